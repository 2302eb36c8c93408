#include "base/fd.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>

namespace cc {
namespace {

constexpr rlim_t kept_descriptors = 512;  // for the program's own files

// Open descriptors, so that a forked child can close them without locks or memory allocation. As many parts as are
// needed, which are never given back.
struct ForkTable {
  std::array<std::atomic<int>, 1024> entries{};  // fd + 1, 0 = free
  std::atomic<ForkTable*> next{nullptr};
};
ForkTable fork_table;

// Changes the first entry that is `from` to `to`. False when there is none.
bool change_entry(int from, int to) {
  for (ForkTable* part = &fork_table; part; part = part->next) {
    for (auto& entry : part->entries) {
      int expected = from;
      if (entry.compare_exchange_strong(expected, to)) return true;
    }
  }
  return false;
}

size_t entries_in_use() {
  size_t count = 0;
  for (ForkTable* part = &fork_table; part; part = part->next) {
    count += static_cast<size_t>(std::count_if(part->entries.begin(), part->entries.end(),
                                               [](const std::atomic<int>& entry) { return entry.load() != 0; }));
  }
  return count;
}

void add_part() {
  ForkTable* const part = std::make_unique<ForkTable>().release();  // for as long as the process lives
  ForkTable* last = &fork_table;
  for (ForkTable* none = nullptr; !last->next.compare_exchange_strong(none, part); none = nullptr) last = last->next;
}

void close_all_in_child() {
  for (ForkTable* part = &fork_table; part; part = part->next) {
    for (auto& entry : part->entries) {
      const int fd = entry.exchange(0) - 1;
      if (fd >= 0) close(fd);
    }
  }
}

}  // namespace

Fd::Fd(int fd) : fd_(fd) {
  static const int registered = pthread_atfork(nullptr, nullptr, close_all_in_child);
  static_cast<void>(registered);
  if (fd_ < 0) return;
  while (!change_entry(0, fd_ + 1)) add_part();
}

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = other.release();
  }
  return *this;
}

void Fd::reset() {
  if (fd_ < 0) return;
  // A descriptor that is not in the table was closed by the fork handler of this (child) process, and its number may
  // belong to someone else by now.
  if (change_entry(fd_ + 1, 0)) close(fd_);
  fd_ = -1;
}

void allow_descriptors(size_t count) {
  rlimit limit{};
  const rlim_t wanted = count + entries_in_use() + kept_descriptors;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(limit.rlim_max, wanted);
  setrlimit(RLIMIT_NOFILE, &limit);  // if it is too few, whoever finds none left says so
}

}  // namespace cc
