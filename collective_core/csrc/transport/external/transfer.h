// What a library that moves whole tensors implements: plain C, because its functions are those of a program.
#pragma once

#include <stdint.h>

// One transfer of data for an external transport. Ranks are those of the process set; rows as in
// cc_operation (c_api.h).
struct cc_transfer {
  int32_t process_set;
  int32_t kind;    // allreduce, broadcast, allgather or alltoall; gpu_memory: reducescatter, too
  int32_t dtype;   // allreduce: one that needs no rounding of ours; gpu_memory: as the caller's
  int32_t reduce;  // allreduce: sum, min, max or product; gpu_memory: as the caller's
  int32_t root;
  int32_t contributors;  // ranks that have not joined: by so many an average divides
  int32_t tag;           // of the cc_operation; 0 on a rank that has joined
  int32_t reserved;
  const void* input;  // broadcast: of the root only; gpu_memory: of all, but both null on a rank that has joined
  void* output;       // may be input; broadcast: of the others only; gpu_memory: null for allgather and alltoall
  uint64_t count;     // allreduce, reducescatter: elements of the input; broadcast: bytes
  uint64_t row_bytes;
  // Null where they mean nothing.
  const int64_t* sent;      // alltoall: rows for each rank; reducescatter: rows of the result that each rank keeps
  const int64_t* received;  // allgather, alltoall: rows from each rank
  uint64_t order;           // of one that is ordered: the highest number that a rank of the process set has proposed
};
// Starts a transfer, of which a process set has one at a time. 0, or the error's text. From any thread. A barrier
// starts nothing: it precedes one that is ordered, and `order` is to be filled in with what this rank proposes. With
// what it has proposed in `order` already, it says that the one that is ordered has failed: if it still waits for its
// turn, it will not be launched.
typedef int32_t (*cc_start)(struct cc_transfer* transfer, char* error, uint64_t capacity);
// 1: the transfer is done; 0: not yet; 2: not begun, because others that are ordered go first, and they may take their
// time; -1: it failed, for the reason in the text.
typedef int32_t (*cc_test)(int32_t process_set, char* error, uint64_t capacity);
