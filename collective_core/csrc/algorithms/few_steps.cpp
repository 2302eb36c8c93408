// Small tensors among H hosts that have agreed on them, in ceil(log2 H) steps of one message per host each way. The
// ranks of a host put their values into memory that they share; their first ranks swap them (host_negotiation.h), and
// all ranks copy the result out.
//
// Allreduce of N bytes, host h owns the h-th part of the elements:
//   1. every host sends the values of its ranks to their owners, by the index algorithm of Bruck et al. (1997): what is
//      for the host at distance j before it goes 2^k hosts back in step k, for every bit k of j;
//   2. the owner adds them in rank order and rounds once; where hosts' sums are added (mesh.cpp), these travel in place
//      of the values;
//   3. hosts send on the results that they know, twice as many in each step (dissemination.h).
// A tree of sums would need a step less in every two and P times fewer bytes, but the order of its sums would follow
// the hosts: this one moves values and adds at the owner, so the bits are those of all other ways.
//
// Network, with P ranks per host: about P N log2(H) / 2 + N bytes sent by every host, without P where hosts' sums
// travel, in 2 log2 H steps. A ring sends 2 N bytes, in 2 (H-1) steps.
//
// Broadcast: a binomial tree; log2 H steps, N bytes over each of H - 1 connections. Allgather: as 3.
//
// Buffers: chunk buffers of the host's memory, N bytes each; the owner's values of all ranks, P N bytes.
#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithms/collectives.h"

namespace cc {
namespace {

void append(std::vector<char>* bytes, const char* from, size_t n) {
  bytes->insert(bytes->end(), from, from + n);
}

// Swaps parts of `memory`, of which each host has one: `begins` where they begin, in bytes, and the end of the last.
void swap_parts(const DataPhase& phase, char* memory, const std::vector<size_t>& begins) {
  const Topology& topology = phase.topology();
  const std::vector<DisseminationStep> steps = plan_doubling(topology.host, topology.host_count());
  const auto of_range = [&](const HostRange& range, const auto& act) {
    for (int i = 0; i < range.count; ++i) {
      const size_t host = static_cast<size_t>((range.first + i) % topology.host_count());
      act(memory + begins[host], begins[host + 1] - begins[host]);
    }
  };
  const auto bytes_of = [&](size_t /*step*/, const FromHost& from) {
    size_t all = 0;
    of_range(from.hosts, [&](const char* /*part*/, size_t n) { all += n; });
    return all;
  };
  const StepContent content{[&](size_t step, std::vector<char>* bytes) {
                              of_range(steps[step].sends, [&](const char* part, size_t n) { append(bytes, part, n); });
                            },
                            [&](size_t step, const FromHost& from, const std::vector<char>& bytes) {
                              if (bytes.size() != bytes_of(step, from)) return false;
                              const char* at = bytes.data();
                              of_range(from.hosts, [&](char* part, size_t n) {
                                if (n) std::memcpy(part, at, n);
                                at += n;
                              });
                              return true;
                            },
                            bytes_of};
  phase.exchange.run_steps(steps, content, phase.deadline);
}

// Values on their way to the hosts that own them, and the sums there.
class Owners {
 public:
  explicit Owners(const DataPhase& phase)
      : phase_(phase),
        topology_(phase.topology()),
        element_(size_of(phase.header().dtype)),
        hosts_(topology_.hosts.size()),
        me_(static_cast<size_t>(topology_.host)),
        by_host_(phase.group.adds_by_host(phase.header())) {
    size_t most = 0;
    for (size_t host = 0; host < hosts_; ++host) most = std::max(most, values_of(host));
    stride_ = part(0).length * most * element_;
    blocks_ = phase.group.staging(hosts_ * stride_);
  }

  Rows part(size_t host) const {
    return rows_of(phase_.header().count, static_cast<int>(host), static_cast<int>(hosts_));
  }
  // Block j: the values for the host at distance j before this one; in the end those of the host at distance j after.
  void fill() {
    std::vector<const void*>& values = phase_.group.sources();
    for (size_t j = 0; j < hosts_; ++j) {
      const Rows of = part(from_me(hosts_ - j));
      if (!of.length) continue;
      values.clear();
      for (int r = 0; r < topology_.local_size(); ++r)
        values.push_back(phase_.group.memory().in(r, 0) + of.begin * element_);
      const size_t bytes = of.length * element_;
      if (by_host_) {
        kernels().reduce(reduction_within(phase_), block(j), values.data(), topology_.local_size(), of.length);
        continue;
      }
      for (size_t r = 0; r < values.size(); ++r) std::memcpy(block(j) + r * bytes, values[r], bytes);
    }
  }
  void deliver() {
    const std::vector<DisseminationStep> steps = plan_doubling(topology_.host, topology_.host_count());
    const auto bytes_of = [this](size_t step, const FromHost& /*from*/) {
      size_t all = 0;
      of_step(step, size_t(1) << step, [&](const char* /*block*/, size_t n) { all += n; });
      return all;
    };
    const StepContent content{[this](size_t step, std::vector<char>* bytes) {
                                of_step(step, 0, [&](const char* block, size_t n) { append(bytes, block, n); });
                              },
                              [&](size_t step, const FromHost& from, const std::vector<char>& bytes) {
                                if (bytes.size() != bytes_of(step, from)) return false;
                                const char* at = bytes.data();
                                of_step(step, size_t(1) << step, [&](char* block, size_t n) {
                                  if (n) std::memcpy(block, at, n);
                                  at += n;
                                });
                                return true;
                              },
                              bytes_of};
    phase_.exchange.run_steps(steps, content, phase_.deadline);
  }
  // Of the own part.
  void add(char* sum) {
    const size_t bytes = part(me_).length * element_;
    if (!bytes) return;
    std::vector<const void*>& sources = phase_.group.sources();
    sources.clear();
    for (size_t host = 0; host < hosts_; ++host) {
      for (size_t r = 0; r < values_of(host); ++r) sources.push_back(block((host + hosts_ - me_) % hosts_) + r * bytes);
    }
    const Reduction reduction = by_host_ ? reduction_among_hosts(phase_) : reduction_of(phase_.operation);
    kernels().reduce(reduction, sum, sources.data(), static_cast<int>(sources.size()), part(me_).length);
  }

 private:
  size_t from_me(size_t distance) const { return (me_ + distance) % hosts_; }
  size_t values_of(size_t host) const { return by_host_ ? 1 : topology_.hosts[host].size(); }  // in a block
  char* block(size_t j) { return blocks_ + j * stride_; }
  // The blocks that move in a step, at a host at distance `after` from this one.
  template <class Act>
  void of_step(size_t step, size_t after, const Act& act) {
    const size_t bit = size_t(1) << step;
    for (size_t j = bit; j < hosts_; ++j) {
      if (!(j & bit)) continue;
      const size_t origin = from_me(after + (j & (bit - 1))), owner = (origin + hosts_ - j) % hosts_;
      act(block(j), values_of(origin) * part(owner).length * element_);
    }
  }

  const DataPhase& phase_;
  const Topology& topology_;
  const size_t element_, hosts_, me_;
  const bool by_host_;
  size_t stride_;  // bytes of a block
  char* blocks_;
};

int doublings(int hosts) {
  int steps = 0;
  while ((1 << steps) < hosts) ++steps;
  return steps;
}

}  // namespace

bool pays_in_few_steps(const DataPhase& phase) {
  // What a connection carries while a message is on its way: about 15 us at 4 GB/s.
  constexpr uint64_t hop_bytes = uint64_t(64) << 10;
  const Topology& topology = phase.topology();
  const int hosts = topology.host_count(), steps = doublings(hosts), ranks = (topology.size + hosts - 1) / hosts;
  const uint64_t bytes = phase.header().bytes();
  // The mesh takes two steps, and many messages in each.
  if (phase.group.adds_by_mesh(phase.header()))
    return phase.group.adds_by_host(phase.header()) && hosts > 2 && bytes <= hop_bytes;
  return bytes <= phase.group.memory().layout().chunk_bytes &&
         bytes * static_cast<uint64_t>(ranks * steps) / 2 <= hop_bytes * static_cast<uint64_t>(2 * (hosts - 1 - steps));
}

void allreduce_few_steps(const DataPhase& phase) {
  HostMemory& memory = phase.group.memory();
  const Topology& topology = phase.topology();
  const size_t bytes = phase.header().bytes();
  char* sums = memory.out(0);
  std::memcpy(memory.in(topology.local_rank, 0), phase.operation.input, bytes);
  phase.group.step_barrier(phase.deadline);
  if (topology.is_leader()) {
    Owners owners(phase);
    std::vector<size_t> begins;
    begins.reserve(topology.hosts.size() + 1);
    for (size_t host = 0; host < topology.hosts.size(); ++host)
      begins.push_back(owners.part(host).begin * size_of(phase.header().dtype));
    begins.push_back(bytes);
    owners.fill();
    owners.deliver();
    owners.add(sums + begins[static_cast<size_t>(topology.host)]);
    swap_parts(phase, sums, begins);
  }
  phase.group.step_barrier(phase.deadline, rank_grace_s);
  std::memcpy(phase.operation.output, sums, bytes);
}

void allgather_few_steps(const DataPhase& phase) {
  const Topology& topology = phase.topology();
  const std::vector<uint64_t> offsets = begin_allgather(phase);
  const auto bytes_of = [&](int rank) { return offsets[rank + 1] - offsets[rank]; };
  // Host after host, as ranks need not be numbered.
  std::vector<size_t> begins{0}, at(offsets.size());
  for (const std::vector<int>& ranks : topology.hosts) {
    size_t end = begins.back();
    for (const int rank : ranks) {
      at[rank] = end;
      end += bytes_of(rank);
    }
    begins.push_back(end);
  }
  char* all = phase.group.memory().out(0);
  const int me = topology.rank;
  if (bytes_of(me)) std::memcpy(all + at[me], phase.operation.input, bytes_of(me));
  phase.group.step_barrier(phase.deadline);
  if (topology.is_leader()) swap_parts(phase, all, begins);
  phase.group.step_barrier(phase.deadline, rank_grace_s);
  for (int rank = 0; rank < topology.size; ++rank) {
    if (bytes_of(rank)) std::memcpy(phase.operation.received_bytes() + offsets[rank], all + at[rank], bytes_of(rank));
  }
}

void broadcast_step(const DataPhase& phase, int root_host, char* bytes, size_t n, bool sends) {
  const Topology& topology = phase.topology();
  const int hosts = topology.host_count(), distance = (root_host - topology.host + hosts) % hosts;
  const int heard = doublings(distance + 1);  // steps until this host has it
  std::vector<DisseminationStep> steps;
  if (!sends && distance) {
    const int from = (topology.host + (1 << (heard - 1))) % hosts;
    steps.push_back({{0, 0}, {}, {{from, {from, 1}}}});
  }
  for (int step = heard; sends && distance + (1 << step) < hosts; ++step)
    steps.push_back({{topology.host, 1}, {(topology.host - (1 << step) + hosts) % hosts}, {}});
  const StepContent content{[&](size_t /*step*/, std::vector<char>* all) { append(all, bytes, n); },
                            [&](size_t /*step*/, const FromHost& /*from*/, const std::vector<char>& all) {
                              if (all.size() == n) std::memcpy(bytes, all.data(), n);
                              return all.size() == n;
                            },
                            [&](size_t /*step*/, const FromHost& /*from*/) { return n; }};
  if (!steps.empty()) phase.exchange.run_steps(steps, content, phase.deadline);
}

}  // namespace cc
