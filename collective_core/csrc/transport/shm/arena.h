// Memory for tensors that all ranks of a host can reach, so that they reduce it where it lies (allreduce_arena.cpp).
//
// One memfd per host, one part of it per rank. A part is as large as the host's memory, but that is only a range of
// addresses: pages exist from the first touch, by the rank that touches, or from the allocation, if they are to be
// large ones, and are given back when a block is freed. A rank allocates in its own part without asking anyone; where a
// tensor lies travels in the header of the operation. Blocks stay valid after the engine is closed, for as long as
// someone holds the Arena.
//
// Blocks of buffers that come and go with every step keep their pages for the next one of their length, as clearing new
// ones would take longer than to reduce them; no more pages than such blocks had in use at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/topology.h"
#include "transport/shm/shared_memory.h"

namespace cc {

// When a block's pages come: from the first touch, or large ones from the allocation, which kept ones outlive.
enum class Pages { touched, large, kept, count };

class Arena {
 public:
  // Shares the arena of this host: its first rank creates it and hands it to the others. A rank whose system does not
  // allow so large a mapping gets one in which nothing can be allocated.
  static std::shared_ptr<Arena> share(const Topology& topology, const std::map<int, Fd>& local, double start_timeout);

  // Aligned to a page, large blocks to a large one; zeroed unless it was used before. Throws Failure(invalid) when the
  // part is full.
  void* allocate(size_t bytes, Pages pages = Pages::touched);
  void release(void* address);
  // No block that is in use is given out again: an operation has failed, in which other ranks may still be at work
  // there.
  void retire();

  // Bytes of this rank's part: given out now, at most so far, and all.
  struct Use {
    uint64_t now, most, all;
  };
  Use use();

  // Where the bytes lie in this rank's part, counted from 1; 0 when they are not, or not wholly, in it.
  uint64_t location_of(const void* address, size_t bytes) const;
  // The address, in this process, of a location in the part of another rank of this host (its rank in the job).
  char* at(int global_rank, uint64_t location) const { return parts_.at(global_rank) + location - 1; }

 private:
  Arena() = default;
  SharedMemory memory_;
  std::map<int, char*> parts_;  // by rank in the job
  char* mine_ = nullptr;
  size_t part_bytes_ = 0;

  std::mutex mutex_;
  struct Block {
    size_t bytes;
    bool keeps, is_retired;
  };
  using Free = std::map<size_t, size_t>;
  Free::iterator find_room(size_t bytes);       // with mutex_ held, like the following
  void give_back(size_t offset, size_t bytes);  // to the system and to free_
  void give_kept_back(size_t bytes);            // until at most so many are kept
  Free free_;                                   // blocks in this rank's part: offset, bytes; never two that touch
  std::map<size_t, Block> used_;
  std::deque<std::pair<size_t, size_t>> kept_;  // offset, bytes; the oldest first
  size_t used_bytes_ = 0, max_used_bytes_ = 0, kept_bytes_ = 0;
  size_t keeping_bytes_ = 0, max_keeping_bytes_ = 0;  // of used blocks that will be kept
};

}  // namespace cc
