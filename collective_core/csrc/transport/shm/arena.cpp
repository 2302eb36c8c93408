#include "transport/shm/arena.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>

#include "base/errors.h"
#include "transport/shm/layout.h"

// Older C libraries lack the names; the kernel has had them since 5.14 and 6.1.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace cc {
namespace {

size_t limit_of(int resource) {
  rlimit limit{};
  return getrlimit(resource, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY ? limit.rlim_cur : SIZE_MAX;
}

// Whole large pages, where it has room for one.
size_t part_of(size_t bytes) {
  return bytes >= large_page ? bytes / large_page * large_page : std::max(bytes / page * page, page);
}

// Brings a block into memory in large pages, as far as the system has them: fewer addresses must be looked up. A page
// must be there already where a large one is to be; where memory is short, none comes, which is no error here.
void use_large_pages(char* block, size_t bytes) {
  const size_t whole = bytes / large_page * large_page;
  for (size_t at = 0; at < whole; at += large_page) {
    if (madvise(block + at, page, MADV_POPULATE_WRITE) != 0) return;
  }
  if (whole) madvise(block, whole, MADV_COLLAPSE);
}

// A range of addresses per rank that no allocation can fill: the host's memory. Less where the process has limits, of
// which the address space must also hold everything else.
size_t wanted_part(size_t ranks) {
  const auto memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t allowed = std::min(limit_of(RLIMIT_FSIZE), limit_of(RLIMIT_AS) / 4);
  return part_of(std::min(memory, allowed / ranks));
}

// Tries smaller ones where the system refuses; the smallest is of no use to anyone, but the other ranks expect one.
void create(SharedMemory* memory, size_t ranks) {
  for (size_t part = wanted_part(ranks);; part = part_of(part / 2)) {
    try {
      return memory->create(part * ranks);
    } catch (const Failure&) {
      if (part == page) throw;
    }
  }
}

}  // namespace

std::shared_ptr<Arena> Arena::share(const Topology& topology, const std::map<int, Fd>& local, double start_timeout) {
  const Deadline deadline(start_timeout);
  const std::vector<int>& ranks = topology.local_ranks();
  std::shared_ptr<Arena> arena(new Arena);
  if (topology.is_leader()) {
    create(&arena->memory_, ranks.size());
    for (const auto& entry : local) send_fd(entry.second.get(), arena->memory_.fd().get(), deadline);
  } else {
    Fd fd = receive_fd(local.at(ranks[0]).get(), deadline);
    try {
      arena->memory_.adopt(std::move(fd));
    } catch (const Failure&) {
      return arena;
    }
  }
  arena->memory_.close_fd();
  arena->part_bytes_ = arena->memory_.bytes() / ranks.size();
  for (size_t i = 0; i < ranks.size(); ++i) {
    arena->parts_[topology.peers[ranks[i]].global_rank] = arena->memory_.data() + i * arena->part_bytes_;
  }
  arena->mine_ = arena->parts_[topology.peers[topology.rank].global_rank];
  arena->free_[0] = arena->part_bytes_;
  return arena;
}

void* Arena::allocate(size_t bytes, bool large_pages) {
  const size_t needed = round_up(std::max<size_t>(bytes, 1), page);
  const size_t unit = needed >= large_page ? large_page : page;
  const auto gap_in = [&](const auto& block) { return round_up(block.first, unit) - block.first; };
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = std::find_if(free_.begin(), free_.end(),
                                  [&](const auto& b) { return b.second >= needed && b.second - needed >= gap_in(b); });
  if (needed < bytes || found == free_.end()) {
    throw Failure(Fault::invalid, "no room for " + std::to_string(bytes) +
                                      " bytes in the memory that the ranks of this "
                                      "host share (" +
                                      std::to_string(part_bytes_) + " bytes per rank)");
  }
  const size_t gap = gap_in(*found), offset = found->first + gap, rest = found->second - gap - needed;
  if (gap) {
    found->second = gap;
  } else {
    free_.erase(found);
  }
  if (rest) free_[offset + needed] = rest;
  used_[offset] = needed;
  used_bytes_ += needed;
  max_used_bytes_ = std::max(max_used_bytes_, used_bytes_);
  lock.unlock();
  if (large_pages) use_large_pages(mine_ + offset, needed);
  return mine_ + offset;
}

void Arena::release(void* address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto used = used_.find(static_cast<size_t>(static_cast<char*>(address) - mine_));
  if (used == used_.end()) return;
  madvise(address, used->second, MADV_REMOVE);  // the pages go back to the system
  used_bytes_ -= used->second;
  auto block = free_.insert(*used).first;
  used_.erase(used);
  const auto next = std::next(block);
  if (next != free_.end() && block->first + block->second == next->first) {
    block->second += next->second;
    free_.erase(next);
  }
  if (block == free_.begin()) return;
  const auto previous = std::prev(block);
  if (previous->first + previous->second != block->first) return;
  previous->second += block->second;
  free_.erase(block);
}

Arena::Use Arena::use() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {used_bytes_, max_used_bytes_, part_bytes_};
}

uint64_t Arena::location_of(const void* address, size_t bytes) const {
  const auto at = reinterpret_cast<uintptr_t>(address), begin = reinterpret_cast<uintptr_t>(mine_);
  if (at < begin || at - begin > part_bytes_ || bytes > part_bytes_ - (at - begin)) return 0;
  return at - begin + 1;
}

}  // namespace cc
