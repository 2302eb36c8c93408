#include "group/group.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "base/cores.h"

namespace cc {
namespace {

// From so many ranks on a barrier is a tree: a rank waits for those below it, and all for the first one. Otherwise each
// reads the lines of all, which the others have written.
constexpr int min_tree_ranks = 32, tree_width = 8;

// Ranks that fit on the cores they may use may spin; otherwise they hand the core over early.
WaitPolicy choose_wait_policy(const Topology& topology, HostMemory& memory) {
  // Of all ranks together: mpirun may bind each to one core of its own.
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int local = 0; local < topology.local_size(); ++local) CPU_OR(&cores, &cores, &memory.cell(local).cores);
  return topology.local_size() <= std::min<double>(CPU_COUNT(&cores), core_quota(getpid())) ? own_core : shared_core;
}

}  // namespace

Group::Group(Topology topology, std::unique_ptr<Transport> transport, double timeout, double start_timeout, int sockets,
             std::shared_ptr<Arena> arena, bool single_copy)
    : topology_(std::move(topology)),
      timeout_(timeout),
      wait_policy_(shared_core),
      transport_(std::move(transport)),
      connections_(transport_->connect(topology_, sockets, start_timeout)),
      memory_(topology_, connections_.local, start_timeout),
      arena_(arena ? std::move(arena) : Arena::share(topology_, connections_.local, start_timeout)),
      failure_detector_(topology_, *transport_, connections_, memory_.control()),
      cross_memory_(*this, single_copy),
      chunks_(transport_->register_memory(memory_.in(0, 0), memory_.chunks_bytes())) {
  Deadline deadline(start_timeout);
  memory_.my_cell().cores = bound_cores();
  cross_memory_.probe(deadline);
  wait_policy_ = choose_wait_policy(topology_, memory_);
}

int Group::next_rank() const {
  return topology_.hosts[(topology_.host + 1) % topology_.host_count()][topology_.local_rank];
}

int Group::previous_rank() const {
  return topology_.hosts[(topology_.host + topology_.host_count() - 1) % topology_.host_count()][topology_.local_rank];
}

void Group::timed_out(const std::vector<int>& missing, const Deadline& deadline) {
  char seconds[32];
  std::snprintf(seconds, sizeof seconds, "%g", deadline.seconds());
  throw Failure(Fault::timeout,
                "no word from " + topology_.describe(missing) + " within " + seconds +
                    " s. Every rank must call the same collectives; COLLECTIVE_TIMEOUT sets the seconds",
                missing);
}

bool Group::is_first_here(const std::vector<int>& missing) const {
  for (const int rank : topology_.local_ranks()) {
    if (std::find(missing.begin(), missing.end(), rank) == missing.end()) return rank == topology_.rank;
  }
  return false;
}

bool Group::is_warning_due(Deadline& deadline) const {
  return current_ && current_->header.kind != Kind::join && deadline.is_warning_due(warn_after_);
}

void Group::warn(const std::string& why, const Deadline& deadline) const {
  std::fprintf(stderr, "collective_core: %s has waited %.0f s in %s%s\n", topology_.describe(topology_.rank).c_str(),
               deadline.waited(), current_->describe().c_str(), why.c_str());
}

void Group::warn_if_due(const std::vector<int>& missing, Deadline& deadline) const {
  if (missing.empty() || !is_warning_due(deadline) || !is_first_here(missing)) return;
  warn(" for " + topology_.describe(missing), deadline);
}

void Group::note_progress(Deadline& deadline) {
  deadline.extend();
  std::atomic<uint32_t>& moves = memory_.my_cell().moves;
  moves.store(moves.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

void Group::extend_by_progress(Deadline& deadline, uint32_t* seen) {
  uint32_t moves = 0;
  for (int local = 0; local < topology_.local_size(); ++local)
    moves += memory_.cell(local).moves.load(std::memory_order_relaxed);
  if (moves != *seen) deadline.extend();
  *seen = moves;
}

std::vector<int> Group::missing_here(Signal RankCell::* signal, uint32_t target) {
  std::vector<int> missing;
  for (int local = 0; local < topology_.local_size(); ++local) {
    if (!has_reached(memory_.cell(local).*signal, target)) missing.push_back(topology_.local_ranks()[local]);
  }
  return missing;
}

void Group::step_barrier(Deadline& deadline, double grace) {
  ++steps_;
  uint32_t moves = 0;  // the first look extends it, as the barrier's end does
  raise_signal(memory_.my_cell().step, steps_);
  const bool is_tree = topology_.local_size() >= min_tree_ranks;
  const auto wait_for_one = [&](int local, Signal& signal) {
    wait_until(signal, steps_, wait_policy_, [&] {
      failure_detector_.check_waiting_for(topology_.local_ranks()[local], signal, steps_);
      std::vector<int> missing = missing_here(&RankCell::step, steps_);
      extend_by_progress(deadline, &moves);
      warn_if_due(missing, deadline);
      const bool all_came = missing.empty();
      if (!deadline.passed_by(all_came ? grace + barrier_grace_s : grace)) return;
      // One of the tree has come and stays: the last, as those below it have higher numbers; or the first rank.
      if (all_came) missing = missing_here(&RankCell::gathered, steps_);
      if (all_came) missing = {missing.empty() ? topology_.local_ranks()[0] : missing.back()};
      if (is_tree || !all_came) timed_out(missing, deadline);
    });
  };
  if (!is_tree) {
    for (int local = 0; local < topology_.local_size(); ++local) wait_for_one(local, memory_.cell(local).step);
  } else {
    Signal& released = memory_.control().released;
    const int first = tree_width * topology_.local_rank + 1;
    for (int below = first; below < std::min(first + tree_width, topology_.local_size()); ++below)
      wait_for_one(below, memory_.cell(below).gathered);
    raise_signal(memory_.my_cell().gathered, steps_);
    if (topology_.is_leader()) raise_signal(released, steps_);
    wait_for_one(0, released);
  }
  deadline.extend();
}

void Group::wait_for(std::vector<PollEntry>& waiting, const std::vector<int>& ranks, Deadline& deadline, double grace) {
  if (transport_->poll(waiting, nap_ms)) return;
  failure_detector_.check();
  // Each rank for itself: its connections to other hosts are its own.
  if (is_warning_due(deadline)) warn(" for " + topology_.describe(ranks), deadline);
  if (deadline.passed_by(grace)) timed_out(ranks, deadline);
}

char* Group::Registered::of(Transport& transport, size_t bytes) {
  if (bytes <= memory_.bytes()) return memory_.of(bytes);
  registration_.reset();
  char* begin = memory_.of(bytes);
  registration_ = transport.register_memory(begin, bytes);
  return begin;
}

}  // namespace cc
