// What an engine's operations have been and what they have waited for, since it began: what a program can ask for at
// any time (c_api.h, cc_counters). An engine runs one operation at a time, so each number has one writer, and adding
// costs neither a lock nor a locked instruction; others read it meanwhile.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <vector>

#include "base/recorder.h"
#include "base/topology.h"

namespace cc {

// Of one kind of operation. Times in nanoseconds.
template <class Number>
struct KindCounters {
  Number operations{0};  // that have ended, well or not
  Number failed{0};      // of these
  Number bytes{0};       // of this rank's tensors
  Number queue_ns{0};    // behind other operations of this rank
  Number peers_ns{0};    // until all ranks had come to the operation, and knew it
  Number hosts_ns{0};    // of this: for other hosts, on the first rank of one of several
  Number transfer_ns{0};
};

constexpr auto kinds = static_cast<size_t>(Kind::count);

// Of engines that are gone, or of several.
struct Totals {
  std::array<KindCounters<uint64_t>, kinds> of_kind{};
};

// What the latest operation has waited for before its ranks agreed.
struct Waits {
  int late = -1;  // the rank of this host that came last, as this rank has seen it; -1: nobody came after this rank
  int64_t hosts_ns = 0;  // as in KindCounters
};

class Counters {
 public:
  Counters(int process_set, const Topology& topology);

  void add(const Event& event, int64_t ended_ns, bool well, const Waits& waits);

  int process_set() const { return process_set_; }
  void add_to(Totals* totals) const;
  // By rank of the job: the time of peers_ns in which that rank of this host came last.
  void add_to(std::map<int, uint64_t>* waited_for_ns) const;

 private:
  using Number = std::atomic<uint64_t>;
  int process_set_;
  std::vector<int> global_ranks_;
  std::array<KindCounters<Number>, kinds> of_kind_{};
  std::vector<Number> waited_for_ns_;  // by rank of the process set
};

}  // namespace cc
