#include "group/cross_memory.h"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>

#include "base/errors.h"
#include "group/group.h"

// Older C libraries lack the name; Yama is of 2010.
#ifndef PR_SET_PTRACER
#define PR_SET_PTRACER 0x59616d61
#endif

namespace cc {
namespace {

constexpr double last_write_s = 10.0;  // for a write that was under way when the other gave up: it takes microseconds

iovec span(const void* begin, size_t at, size_t bytes) {
  return {const_cast<char*>(static_cast<const char*>(begin)) + at, bytes};
}

// Where Yama restricts tracing to descendants: allows it to those of our parent, the launcher, which may do so anyway.
// Not when that is the first process, of which everybody descends.
void allow_siblings() {
  const pid_t parent = getppid();
  if (parent > 1) prctl(PR_SET_PTRACER, static_cast<unsigned long>(parent), 0, 0, 0);  // refused where there is no Yama
}

}  // namespace

void CrossMemory::probe(Deadline& deadline) {
  RankCell& mine = group_.memory().my_cell();
  std::random_device random;
  token_ = (static_cast<uint64_t>(random()) << 32 | random()) | 1;
  if (wanted_ && group_.topology().local_size() > 1) allow_siblings();
  mine.token = wanted_ ? token_ : 0;
  mine.input = &token_;
  group_.step_barrier(deadline);
  available_ = all_could(can_read_all(), deadline);
}

pid_t CrossMemory::pid_of(int local_rank) const {
  const Topology& topology = group_.topology();
  return static_cast<pid_t>(topology.peers[topology.local_ranks()[local_rank]].pid);
}

bool CrossMemory::all_could(bool could, Deadline& deadline) {
  group_.memory().my_cell().can_attach = could;
  group_.step_barrier(deadline);
  bool all = true;
  for (int local = 0; local < group_.topology().local_size(); ++local)
    all = all && group_.memory().cell(local).can_attach;
  return all;
}

bool CrossMemory::can_read_all() {
  const Topology& topology = group_.topology();
  for (int local = 0; local < topology.local_size(); ++local) {
    const RankCell& cell = group_.memory().cell(local);
    uint64_t token = 0;
    const iovec here = span(&token, 0, sizeof token), there = span(cell.input, 0, sizeof token);
    if (cell.token == 0 || process_vm_readv(pid_of(local), &here, 1, &there, 1, 0) != sizeof token) return false;
    if (token != cell.token) return false;  // another process that has this number in our namespace
  }
  return true;
}

bool CrossMemory::is_attachable(const void* begin, size_t bytes) const {
  char ends[2];
  const iovec here = span(ends, 0, sizeof ends), there[] = {span(begin, 0, 1), span(begin, bytes - 1, 1)};
  return available_ && process_vm_readv(getpid(), &here, 1, there, 2, 0) == sizeof ends;
}

void CrossMemory::publish(const void* input, void* output, Deadline& deadline) {
  group_.memory().my_cell().input = input;
  group_.memory().my_cell().output = output;
  group_.step_barrier(deadline);
}

bool CrossMemory::attach(const void* input, size_t bytes, Deadline& deadline) {
  publish(input, nullptr, deadline);
  bool could = true;
  for (int local = 0; local < group_.topology().local_size(); ++local) could = could && can_read_ends(local, bytes);
  return all_could(could, deadline);
}

bool CrossMemory::can_read_ends(int local_rank, size_t bytes) {
  const RankCell& cell = group_.memory().cell(local_rank);
  char ends[2];
  const iovec here = span(ends, 0, sizeof ends), there[] = {span(cell.input, 0, 1), span(cell.input, bytes - 1, 1)};
  return process_vm_readv(pid_of(local_rank), &here, 1, there, 2, 0) == sizeof ends;
}

void CrossMemory::read_input(int local_rank, size_t at, void* target, size_t bytes) {
  const iovec here = span(target, 0, bytes), there = span(group_.memory().cell(local_rank).input, at, bytes);
  const ssize_t read = process_vm_readv(pid_of(local_rank), &here, 1, &there, 1, 0);
  if (read != static_cast<ssize_t>(bytes)) failed(local_rank, "process_vm_readv", read < 0 ? errno : EFAULT);
}

void CrossMemory::write_output(int local_rank, size_t at, const void* source, size_t bytes) {
  const RankCell& theirs = group_.memory().cell(local_rank);
  const iovec here = span(source, 0, bytes), there = span(theirs.output, at, bytes);
  bool closed = false;
  ssize_t written = 0;
  int error = EFAULT;
  {
    const Writing writing(*this);
    closed = theirs.closed.load(std::memory_order_seq_cst) != 0;
    if (!closed) written = process_vm_writev(pid_of(local_rank), &here, 1, &there, 1, 0);
    if (written < 0) error = errno;
  }
  if (closed) lost(local_rank);
  if (written != static_cast<ssize_t>(bytes)) failed(local_rank, "process_vm_writev", error);
}

// Sequentially consistent on both sides: either we see that it is closed, or its owner sees that we write.
CrossMemory::Writing::Writing(CrossMemory& memory) : writes_(memory.group_.memory().my_cell().writes) {
  writes_.fetch_add(1, std::memory_order_seq_cst);
}

int CrossMemory::first_closed() {
  for (int local = 0; local < group_.topology().local_size(); ++local) {
    if (group_.memory().cell(local).closed.load(std::memory_order_seq_cst) != 0) return local;
  }
  return -1;
}

void CrossMemory::lost(int local_rank) {
  group_.failure_detector().lost(group_.topology().local_ranks()[local_rank]);
}

void CrossMemory::check_open() {
  std::atomic_thread_fence(std::memory_order_seq_cst);  // after what has been read
  const int closed = first_closed();
  if (closed >= 0) lost(closed);
}

void CrossMemory::close() {
  group_.memory().my_cell().closed.store(1, std::memory_order_seq_cst);
}

void CrossMemory::wait_for_writes() {
  const Topology& topology = group_.topology();
  const Deadline limit(last_write_s);
  for (int local = 0; local < topology.local_size(); ++local) {
    const std::atomic<uint32_t>& writes = group_.memory().cell(local).writes;
    const uint32_t seen = writes.load(std::memory_order_seq_cst);
    if (local == topology.local_rank || seen % 2 == 0) continue;
    // One that has died in the middle of a write has ended it, too, but cannot say so.
    while (writes.load(std::memory_order_acquire) == seen && !limit.passed() &&
           group_.failure_detector().is_alive(topology.local_ranks()[local])) {
      poll(nullptr, 0, 1);  // the one that writes may need this core
    }
  }
}

void CrossMemory::failed(int local_rank, const char* call, int error) {
  const int rank = group_.topology().local_ranks()[local_rank];
  // One that has given up may have freed its tensor by now, and of one that dies the memory goes first.
  group_.failure_detector().check_host();
  const bool has_given_up = group_.memory().cell(local_rank).closed.load() != 0;
  if (error == ESRCH || has_given_up || !group_.failure_detector().is_alive(rank)) group_.failure_detector().lost(rank);
  throw Failure(Fault::internal,
                group_.topology().describe(group_.topology().rank) + ": " + call + " of the tensor of " +
                    group_.topology().describe(rank) + ": " + std::strerror(error) +
                    "; with COLLECTIVE_SINGLE_COPY=0 on any rank it is not used",
                {rank});
}

}  // namespace cc
