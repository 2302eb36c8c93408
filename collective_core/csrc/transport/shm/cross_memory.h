// Reading and writing the memory of the other ranks of this host, which the system may allow: one copy in place of two
// through shared chunks (allreduce_direct.cpp).
//
// Linux has process_vm_readv and process_vm_writev for processes that may trace each other: of one user, where neither
// Yama nor a container's filter forbids it. Whether they may, the ranks find out together when they start, by
// reading a random number of each other; where one of them may not, all keep to shared chunks.
//
// A rank that gives up an operation hands its memory back to its caller, who may free it, while others still write into
// it. So whoever writes says so before, and looks whether the other has given up; whoever gives up says so first, and
// then waits for those who were just writing.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "core/deadline.h"

namespace cc {

class Group;

class Reach {
 public:
  // wanted: false where the user has forbidden it; one rank's no is everybody's.
  Reach(Group& group, bool wanted) : group_(group), wanted_(wanted) {}

  // Finds out whether every rank of this host reaches every other; all ranks ask together.
  void ask(Deadline& deadline);
  bool is_given() const { return given_; }

  // Tells the others where this rank's tensors of so many bytes lie, and returns whether all reach all of them: the
  // system keeps memory that a driver has mapped, such as pinned memory, from other processes.
  bool meet(const void* input, void* output, size_t bytes, Deadline& deadline);
  // Copies between own memory and the tensors that the others told of, `at` bytes from their begin.
  void read_input(int local_rank, size_t at, void* target, size_t bytes);
  void write_output(int local_rank, size_t at, const void* source, size_t bytes);
  // This rank gives up: when it returns, nobody writes into its tensor any more.
  void close();

 private:
  pid_t process_of(int local_rank) const;
  bool can_read_all();
  bool can_read_ends(int local_rank, size_t bytes);
  // Says whether this rank could, and returns whether all could.
  bool all_could(bool could, Deadline& deadline);
  [[noreturn]] void failed(int local_rank, const char* call, int error);

  Group& group_;
  const bool wanted_;
  bool given_ = false;
  uint64_t token_ = 0;  // what the others read to see whether they can
};

}  // namespace cc
