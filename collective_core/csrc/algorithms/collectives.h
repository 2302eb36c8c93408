// The algorithms, one file each, and what they share. selection.h chooses among them.
#pragma once

#include <cstdint>
#include <vector>

#include "algorithms/data_phase.h"
#include "kernels/kernels.h"

namespace cc {

// Of tensors that came with the headers, and of a single rank's, which need not travel (inline.cpp).
void reduce_inline(const DataPhase& phase);  // allreduce and reducescatter
void broadcast_inline(const DataPhase& phase);
void allgather_inline(const DataPhase& phase);

void allreduce_local(const DataPhase& phase);
// By cross-memory attach; where not all of these tensors can be attached to, as allreduce_local.
void allreduce_direct(const DataPhase& phase);
// For tensors that lie in the arena on every rank of this host.
void allreduce_arena(const DataPhase& phase);
// Where Group::adds_by_mesh().
void allreduce_mesh(const DataPhase& phase);
void allreduce_ring(const DataPhase& phase);

// In rank order, as the ring: of few bytes, where pays_in_few_steps.
void allreduce_few_steps(const DataPhase& phase);
bool pays_in_few_steps(const DataPhase& phase);
// The one to take of those between hosts.
Algorithm allreduce_between_hosts(const DataPhase& phase);

void broadcast(const DataPhase& phase);

// Reduces all ranks' `input` and leaves this rank's rows of the result in `output`.
void reducescatter_local(const DataPhase& phase);
// By cross-memory attach; where not all of these tensors can be attached to, as reducescatter_local.
void reducescatter_direct(const DataPhase& phase);
void reducescatter_mesh(const DataPhase& phase);
void reducescatter_by_allreduce(const DataPhase& phase);

// Gathers all ranks' `input` into `received_bytes`, for which they allocate memory where `output` is none.
void allgather_local(const DataPhase& phase);
// By cross-memory attach, where all send as much; where not all of these tensors can be attached to, as
// allgather_local.
void allgather_direct(const DataPhase& phase);
void allgather_by_broadcasts(const DataPhase& phase);
// Between hosts, of at most Layout::chunk_bytes in all.
void allgather_few_steps(const DataPhase& phase);

// Sends rows of `input` to every rank. Allocates `gathered`.
void alltoall(const DataPhase& phase);

// Over phase.external (external.cpp).
void external_allreduce(const DataPhase& phase);
void external_reducescatter(const DataPhase& phase);
void external_broadcast(const DataPhase& phase);
void external_allgather(const DataPhase& phase);
void external_alltoall(const DataPhase& phase);
// Any of these in the memory of a GPU: the library does all of it, and has the memory for what is received.
void external_on_gpu(const DataPhase& phase);

// ------------------------------------------------------------------------------------------------- shared parts

inline Reduction reduction_of(const Operation& operation) {
  const Header& header = operation.header;
  return {header.dtype, header.reduce, header.reduce == ReduceOp::average ? operation.contributors : 1, header.prescale,
          header.postscale};
}

// out = the sums, which `accumulate` has made, added in their order and rounded. The first is overwritten.
void finish_sums(const Reduction& reduction, void* out, const std::vector<const void*>& sums, size_t length);

// The part of n elements that worker `index` of `workers` takes; boundaries lie on cache lines so that no two workers
// write one line. Later slices may be shorter or empty.
struct Slice {
  size_t begin, length;
};
inline Slice slice_of(size_t n, int index, int workers, size_t element_bytes) {
  const size_t share =
      round_up((n + static_cast<size_t>(workers) - 1) / static_cast<size_t>(workers), cache_line / element_bytes);
  const size_t begin = static_cast<size_t>(index) * share < n ? static_cast<size_t>(index) * share : n;
  return {begin, n - begin < share ? n - begin : share};
}

// By cross-memory attach: `transfer`, and then a barrier, where all ranks of this host can attach to all of these
// tensors; elsewhere `otherwise`. `output`: what the others write to, or the input where they only read.
template <class Transfer>
void run_attached(const DataPhase& phase, const void* output, Algorithm otherwise, Transfer transfer) {
  CrossMemory& cross_memory = phase.group.cross_memory();
  const Operation& operation = phase.operation;
  try {
    if (cross_memory.attach(operation.input, const_cast<void*>(output), operation.header.bytes(), phase.deadline)) {
      transfer();
      return phase.group.step_barrier(phase.deadline);
    }
  } catch (...) {
    cross_memory.close();
    throw;
  }
  otherwise(phase);
}

// Reduces a slice of the tensors to which the ranks of this host have attached, in rank order, into `result`, block by
// block (allreduce_direct.cpp). `spread`: into the same place of the others' results, too.
void reduce_attached(const DataPhase& phase, const Slice& slice, char* result, bool spread);

// Rows are dealt out as evenly as can be, the first ranks get one more.
struct Rows {
  uint64_t begin, length;
};
Rows rows_of(uint64_t rows, int rank, int size);
// A reducescatter by way of the whole sum, which `allreduce` forms part by part in `sum`, memory of sum_bytes_of bytes.
void reduce_by_allreduce(const DataPhase& phase, char* sum, Algorithm allreduce);
size_t sum_bytes_of(const Header& header);

// Copies `bytes` bytes from the root's `source` to every other rank's `target`. `chunk` counts the chunks of a series
// of broadcasts: it starts at 0 and must be handed on, because two successive chunks must not use the same buffer.
void broadcast_bytes(const DataPhase& phase, int root, const void* source, void* target, uint64_t bytes,
                     uint64_t* chunk);

// A leader's part in a broadcast of few bytes between hosts, which lie in `bytes`: receives them, or sends them on.
void broadcast_step(const DataPhase& phase, int root_host, char* bytes, size_t n, bool sends);

// Finds `received` in the headers and the memory for `received_bytes`. Returns where in it each rank's bytes start;
// they end where the next rank's start.
std::vector<uint64_t> begin_allgather(const DataPhase& phase);
// Whether every rank's tensor has as many bytes as this one's.
bool all_send_as_much(const DataPhase& phase);

// splits[r][d] rows go from rank r to rank d.
using Splits = std::vector<std::vector<int64_t>>;
// As they came with the headers of an alltoall; a rank that has joined sends nothing. Throws Failure for those that are
// not of the rank's rows.
Splits splits_of_all(const Topology& topology, const std::vector<const Header*>& headers);
// As begin_allgather, from the splits.
std::vector<uint64_t> begin_alltoall(const DataPhase& phase, const Splits& splits);

}  // namespace cc
