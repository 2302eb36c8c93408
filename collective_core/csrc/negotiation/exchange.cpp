#include "negotiation/exchange.h"

#include <cstring>

namespace cc {

void Exchange::run(Header* header, const void* payload, Deadline& deadline) {
  const Topology& topology = group_.topology();
  header->sequence = ++sequence_;
  Header* mine = group_.memory().slot(sequence_, topology.rank);
  std::memcpy(mine, header, sizeof *header);
  if (header->inline_bytes) std::memcpy(HostMemory::payload(mine), payload, header->inline_bytes);
  raise_signal(group_.memory().my_cell().published, sequence_);

  const bool alone = topology.host_count() == 1;
  if (alone) return wait_for_local(deadline);
  if (topology.is_leader()) {
    host_negotiation_.begin(sequence_);
    try {
      wait_for_local(deadline);
      const int64_t here = monotonic_ns();
      host_negotiation_.fill_slots(deadline);
      waits_.hosts_ns += monotonic_ns() - here;
    } catch (const Failure&) {
      host_negotiation_.give_up();
      throw;
    }
    raise_signal(group_.memory().control().world, sequence_);
    return;
  }
  const int leader = topology.local_ranks()[0];
  const auto& naps = group_.memory().control().leader_naps;
  uint32_t seen = naps.load(std::memory_order_relaxed);
  uint32_t moves = 0;
  Deadline silence(rank_grace_s);  // of the leader, who may have reasons to wait beyond our deadline
  Signal& world = group_.memory().control().world;
  wait_until(world, sequence_, group_.wait_policy(), [&] {
    group_.failure_detector().check_waiting_for(leader, world, sequence_);
    group_.extend_by_progress(deadline, &moves);
    const std::vector<int> missing = group_.missing_here(&RankCell::published, sequence_);
    group_.warn_if_due(missing, deadline);
    if (naps.load(std::memory_order_relaxed) != seen) silence.extend();
    seen = naps.load(std::memory_order_relaxed);
    if (!deadline.passed_by(rank_grace_s) || !silence.passed()) return;
    group_.timed_out(missing.empty() ? std::vector<int>{leader} : missing, deadline);
  });
}

void Exchange::run_again(Header* header, Deadline& deadline) {
  const int late = waits_.late;
  run(header, nullptr, deadline);
  waits_.late = late;
}

void Exchange::wait_for_local(Deadline& deadline) {
  const Topology& topology = group_.topology();
  waits_.late = -1;
  for (int local = 0; local < topology.local_size(); ++local) {
    Signal& published = group_.memory().cell(local).published;
    if (has_reached(published, sequence_)) continue;
    // Those before it have come, and whoever is not waited for any more came earlier.
    waits_.late = topology.local_ranks()[local];
    wait_until(published, sequence_, group_.wait_policy(), [&] {
      group_.failure_detector().check_waiting_for(topology.local_ranks()[local], published, sequence_);
      const std::vector<int> missing = group_.missing_here(&RankCell::published, sequence_);
      group_.warn_if_due(missing, deadline);
      if (topology.host_count() > 1) host_negotiation_.still_waiting(deadline);
      if (!deadline.passed()) return;
      if (!missing.empty()) group_.timed_out(missing, deadline);
    });
  }
}

}  // namespace cc
