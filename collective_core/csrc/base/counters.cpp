#include "base/counters.h"

#include <algorithm>

namespace cc {
namespace {

void count(std::atomic<uint64_t>& number, int64_t more) {
  number.store(number.load(std::memory_order_relaxed) + static_cast<uint64_t>(more), std::memory_order_relaxed);
}

uint64_t read(const std::atomic<uint64_t>& number) {
  return number.load(std::memory_order_relaxed);
}

}  // namespace

Counters::Counters(int process_set, const Topology& topology)
    : process_set_(process_set), waited_for_ns_(topology.peers.size()) {
  for (const Peer& peer : topology.peers) global_ranks_.push_back(peer.global_rank);
}

void Counters::add(const Event& event, int64_t ended_ns, bool well, const Waits& waits) {
  KindCounters<Number>& of_kind = of_kind_[event.kind];
  // Nobody looks at the clock where the data has come with the question, and a failure may come before the answer.
  const int64_t agreed_ns = event.agreed_ns ? event.agreed_ns : ended_ns;
  count(of_kind.operations, 1);
  if (!well) count(of_kind.failed, 1);
  count(of_kind.bytes, static_cast<int64_t>(event.bytes));
  // The ranks may have agreed on an operation that was submitted while this one waited with another.
  count(of_kind.queue_ns, std::max<int64_t>(0, event.started_ns - event.queued_ns));
  count(of_kind.peers_ns, agreed_ns - event.started_ns);
  count(of_kind.transfer_ns, ended_ns - agreed_ns);
  if (waits.hosts_ns) count(of_kind.hosts_ns, waits.hosts_ns);
  if (waits.late >= 0) count(waited_for_ns_[static_cast<size_t>(waits.late)], agreed_ns - event.started_ns);
}

void Counters::add_to(Totals* totals) const {
  for (size_t kind = 0; kind < kinds; ++kind) {
    const KindCounters<Number>& mine = of_kind_[kind];
    KindCounters<uint64_t>& sum = totals->of_kind[kind];
    sum.operations += read(mine.operations);
    sum.failed += read(mine.failed);
    sum.bytes += read(mine.bytes);
    sum.queue_ns += read(mine.queue_ns);
    sum.peers_ns += read(mine.peers_ns);
    sum.hosts_ns += read(mine.hosts_ns);
    sum.transfer_ns += read(mine.transfer_ns);
  }
}

void Counters::add_to(std::map<int, uint64_t>* waited_for_ns) const {
  for (size_t rank = 0; rank < waited_for_ns_.size(); ++rank) {
    const uint64_t waited = read(waited_for_ns_[rank]);
    if (waited) (*waited_for_ns)[global_ranks_[rank]] += waited;
  }
}

}  // namespace cc
