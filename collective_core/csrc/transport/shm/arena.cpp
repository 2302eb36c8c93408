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

size_t unit_of(size_t bytes) {
  return bytes >= large_page ? large_page : page;
}

// From its begin to where a block can lie.
size_t gap_in(const std::pair<const size_t, size_t>& room, size_t bytes) {
  return round_up(room.first, unit_of(bytes)) - room.first;
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

void* Arena::allocate(size_t bytes, Pages pages) {
  const size_t needed = round_up(std::max<size_t>(bytes, 1), page);
  std::unique_lock<std::mutex> lock(mutex_);
  const auto is_alike = [&](const auto& kept) { return kept.second == needed; };
  const auto kept = pages == Pages::kept ? std::find_if(kept_.begin(), kept_.end(), is_alike) : kept_.end();
  const bool is_new = kept == kept_.end();
  size_t offset = 0;
  if (is_new) {
    auto room = find_room(std::max(needed, bytes));
    if (room == free_.end() && !kept_.empty()) {
      give_kept_back(0);
      room = find_room(std::max(needed, bytes));
    }
    if (room == free_.end()) {
      throw Failure(Fault::invalid, "no room for " + std::to_string(bytes) +
                                        " bytes in the memory that the ranks of this "
                                        "host share (" +
                                        std::to_string(part_bytes_) + " bytes per rank)");
    }
    const size_t gap = gap_in(*room, needed), rest = room->second - gap - needed;
    offset = room->first + gap;
    if (gap) {
      room->second = gap;
    } else {
      free_.erase(room);
    }
    if (rest) free_[offset + needed] = rest;
  } else {
    offset = kept->first;
    kept_bytes_ -= needed;
    kept_.erase(kept);
  }
  used_[offset] = {needed, pages == Pages::kept, false};
  used_bytes_ += needed;
  max_used_bytes_ = std::max(max_used_bytes_, used_bytes_);
  if (pages == Pages::kept) {
    keeping_bytes_ += needed;
    max_keeping_bytes_ = std::max(max_keeping_bytes_, keeping_bytes_);
    give_kept_back(max_keeping_bytes_ - keeping_bytes_);
  }
  lock.unlock();
  if (is_new && pages != Pages::touched) use_large_pages(mine_ + offset, needed);
  return mine_ + offset;
}

Arena::Free::iterator Arena::find_room(size_t bytes) {
  return std::find_if(free_.begin(), free_.end(),
                      [&](const auto& b) { return b.second >= bytes && b.second - bytes >= gap_in(b, bytes); });
}

void Arena::release(void* address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto used = used_.find(static_cast<size_t>(static_cast<char*>(address) - mine_));
  if (used == used_.end()) return;
  const auto [offset, block] = *used;
  used_.erase(used);
  used_bytes_ -= block.bytes;
  if (block.keeps) keeping_bytes_ -= block.bytes;
  if (block.is_retired) {
    madvise(address, block.bytes, MADV_REMOVE);
  } else if (block.keeps) {
    kept_.emplace_back(offset, block.bytes);
    kept_bytes_ += block.bytes;
  } else {
    give_back(offset, block.bytes);
  }
}

void Arena::retire() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& used : used_) used.second.is_retired = true;
}

void Arena::give_kept_back(size_t bytes) {
  while (kept_bytes_ > bytes) {
    const auto [offset, length] = kept_.front();
    kept_.pop_front();
    kept_bytes_ -= length;
    give_back(offset, length);
  }
}

void Arena::give_back(size_t offset, size_t bytes) {
  madvise(mine_ + offset, bytes, MADV_REMOVE);  // the pages go back to the system
  auto block = free_.emplace(offset, bytes).first;
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
  if (bytes == 0 || at < begin || at - begin > part_bytes_ || bytes > part_bytes_ - (at - begin)) return 0;
  return at - begin + 1;
}

}  // namespace cc
