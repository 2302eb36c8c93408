// The ranks of a job as one of them sees it: topology, connections, shared memory, and the waits that all collectives
// use.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/memory.h"
#include "base/operation.h"
#include "base/topology.h"
#include "group/cross_memory.h"
#include "liveness/failure_detector.h"
#include "transport/seam.h"
#include "transport/shm/arena.h"
#include "transport/shm/host_memory.h"

namespace cc {

// More than the grace of those who wait for other hosts in a data phase (slice_streams.cpp), less than that of hosts
// that are in the next negotiation (host_negotiation.cpp).
constexpr double barrier_grace_s = 0.75;

class Group {
 public:
  // Connects to all peers over the transport; returns when every rank that this one talks to is there.
  // timeout: seconds without progress after which a collective fails. start_timeout: seconds for connecting.
  // sockets: data connections from one rank to another; the same on all ranks.
  // arena: of the whole job's group, when this is one of a process set; null: shares a new one.
  // single_copy: whether this rank agrees to cross-memory attach.
  Group(Topology topology, std::unique_ptr<Transport> transport, double timeout, double start_timeout, int sockets = 1,
        std::shared_ptr<Arena> arena = nullptr, bool single_copy = true);

  const Topology& topology() const { return topology_; }
  FailureDetector& failure_detector() { return failure_detector_; }
  Transport& transport() { return *transport_; }
  Connections& connections() { return connections_; }
  HostMemory& memory() { return memory_; }
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  CrossMemory& cross_memory() { return cross_memory_; }
  double timeout() const { return timeout_; }
  const WaitPolicy& wait_policy() const { return wait_policy_; }

  // Memory of this rank's own for a data phase (KeptMemory), and for a sum of which it needs a part. Throws Failure
  // where there is not so much.
  char* staging(size_t bytes) { return staging_.of(*transport_, bytes); }
  char* sum(size_t bytes) { return sum_.of(*transport_, bytes); }

  // For the inputs of a reduction of small tensors, which then allocates nothing.
  std::vector<const void*>& sources() { return sources_; }

  // Bytes have moved from or to another host: this rank has not stalled, nor have those of its host that wait for it.
  void note_progress(Deadline& deadline);
  // Extends it where bytes have moved from or to this host since the last look, which `seen` is of.
  void extend_by_progress(Deadline& deadline, uint32_t* seen);
  // Ranks of this host that have not raised this signal so far.
  std::vector<int> missing_here(Signal RankCell::* signal, uint32_t target);
  // Ends one step of a data phase and waits until every rank of the host has ended it too. `grace`: seconds beyond the
  // deadline, in which those who are waited for may say for whom they wait.
  void step_barrier(Deadline& deadline, double grace = barrier_grace_s);
  // Waits until one of these connections is ready, where `ranks` are missing. Throws like every wait. `grace`: seconds
  // beyond the deadline, in which other ranks may say for whom they wait.
  void wait_for(std::vector<PollEntry>& waiting, const std::vector<int>& ranks, Deadline& deadline, double grace = 0);
  // Whether every rank has data connections to and from its partners on all other hosts.
  bool has_mesh() const {
    return topology_.host_count() > 1 && topology_.is_even() && connections_.to.size() + 1 == topology_.hosts.size();
  }
  // Whether sums go over it: in rank order with a rank per host, else of hosts' sums (`adds_by_host`) where the job
  // wants that.
  void add_by_host(bool wanted) { by_host_ = wanted; }
  bool adds_by_host(const Header& header) const { return topology_.local_size() > 1 && adds_by_mesh(header); }
  bool adds_by_mesh(const Header& header) const {
    // A host's product need not be a number that a half type has.
    const bool travels = header.reduce != ReduceOp::product || !is_half(header.dtype);
    return has_mesh() && (topology_.local_size() == 1 || (by_host_ && travels));
  }
  int next_rank() const;  // on the ring of hosts
  int previous_rank() const;

  // The operation that this rank runs or waits for, for messages.
  void set_current(const Operation* operation) { current_ = operation; }
  // After so many seconds of waiting a rank says on stderr whom it waits for; 0: never.
  void warn_after(double seconds) { warn_after_ = seconds; }
  double warn_after() const { return warn_after_; }
  // Whether it is time to do so.
  bool is_warning_due(Deadline& deadline) const;
  // Says it; `why` goes on after the operation.
  void warn(const std::string& why, const Deadline& deadline) const;
  // Called now and then by waits for ranks that have not come; one rank of the host speaks for all.
  void warn_if_due(const std::vector<int>& missing, Deadline& deadline) const;
  bool is_first_here(const std::vector<int>& missing) const;
  [[noreturn]] void timed_out(const std::vector<int>& missing, const Deadline& deadline);

 private:
  Topology topology_;
  double timeout_;
  WaitPolicy wait_policy_;
  const std::unique_ptr<Transport> transport_;
  Connections connections_;
  HostMemory memory_;
  std::shared_ptr<Arena> arena_;
  FailureDetector failure_detector_;
  CrossMemory cross_memory_;
  class Registered {  // segments are sent from there and received there
   public:
    char* of(Transport& transport, size_t bytes);

   private:
    KeptMemory memory_;
    std::shared_ptr<void> registration_;
  };
  Registered staging_, sum_;
  const std::shared_ptr<void> chunks_;  // that those are registered
  std::vector<const void*> sources_;
  uint32_t steps_ = 0;
  const Operation* current_ = nullptr;
  double warn_after_ = 0;
  bool by_host_ = false;
};

}  // namespace cc
