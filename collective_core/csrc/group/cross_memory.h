// Cross-memory attach: reading and writing the memory of the other ranks of this host, which the system may allow. One
// copy in place of two through shared chunks (reducescatter.cpp, allgather.cpp, host_buffers.cpp).
//
// Linux has process_vm_readv and process_vm_writev for processes that may trace each other: of one user, where neither
// Yama nor a container's filter forbids it. Whether they may, the ranks find out together when they start, by
// reading a random number of each other; where one of them may not, all keep to shared chunks.
//
// A rank that gives up an operation hands its memory back to its caller, who may free it, while others still write into
// it, this way or in the arena. So whoever writes says so before, and looks whether the other has given up; whoever
// gives up says so first, and then waits for those who were just writing.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/deadline.h"

namespace cc {

class Group;

class CrossMemory {
 public:
  // wanted: false where the user has forbidden it; one rank's no is everybody's.
  CrossMemory(Group& group, bool wanted) : group_(group), wanted_(wanted) {}

  // Finds out whether every rank of this host can attach to every other; all ranks do so together.
  void probe(Deadline& deadline);
  bool is_available() const { return available_; }

  // Whether the others could attach to this rank's own memory: asked of the system before the tensors are published.
  bool is_attachable(const void* begin, size_t bytes) const;
  // Publishes the addresses of this rank's tensors; returns when all ranks of this host have.
  void publish(const void* input, void* output, Deadline& deadline);
  // Publishes the address of this rank's tensor of so many bytes, and returns whether all ranks can read all of them:
  // the system keeps memory that a driver has mapped, such as pinned memory, from other processes.
  bool attach(const void* input, size_t bytes, Deadline& deadline);
  // Copies between own memory and the tensors that the others have published, `at` bytes from their begin.
  void read_input(int local_rank, size_t at, void* target, size_t bytes);
  void write_output(int local_rank, size_t at, const void* source, size_t bytes);
  // Runs `store`, which writes into tensors of others that this rank has mapped (arena.h), unless one has given up.
  template <class Store>
  void write_mapped(Store store) {
    int closed = -1;
    {
      const Writing writing(*this);
      closed = first_closed();
      if (closed < 0) store();
    }
    if (closed >= 0) lost(closed);
  }
  // After reading tensors of others: throws where one of them has given up, which may have changed its own meanwhile.
  void check_open();
  // This rank gives up: nobody begins to write into its tensor any more.
  void close();
  // After that: when it returns, nobody writes there, but for a process that has stood still in a write for
  // last_write_s.
  void wait_for_writes();

 private:
  // Says to the others that this rank writes into their memory.
  class Writing {
   public:
    explicit Writing(CrossMemory& memory);
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;
    ~Writing() { writes_.fetch_add(1, std::memory_order_release); }

   private:
    std::atomic<uint32_t>& writes_;
  };
  int first_closed();  // rank of this host that has given up; -1: none
  [[noreturn]] void lost(int local_rank);
  pid_t pid_of(int local_rank) const;
  bool can_read_all();
  bool can_read_ends(int local_rank, size_t bytes);
  // Says whether this rank could, and returns whether all could.
  bool all_could(bool could, Deadline& deadline);
  [[noreturn]] void failed(int local_rank, const char* call, int error);

  Group& group_;
  const bool wanted_;
  bool available_ = false;
  uint64_t token_ = 0;  // what the others read to see whether they can
};

}  // namespace cc
