// The negotiation between hosts: their leaders (first ranks) tell each other what the ranks of all hosts ask for.
//
// Who sends to whom and in which step is planned once (dissemination.h); encoded headers (header_codec.h) travel in a
// frame on the control connection. Those of later steps are taken as they come. In the same way small tensors travel
// whose hosts have agreed (algorithms/few_steps.cpp). Failures, departures and deaths
// are seen on all control connections, not only on those of the plan, so a death is as near with 200 hosts as with two.
//
// A host that waits cannot tell from silence who is late: its partner may be waiting too, for another host or for a
// rank of its own. So a leader that has waited for a moment announces it to all others. Whoever has neither been heard
// of nor announced it is missing; and one that has gets the time to find out, and to report, for whom.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <set>
#include <vector>

#include "group/group.h"
#include "negotiation/dissemination.h"

namespace cc {

// What the exchanges of this rank have cost: of a leader of several hosts, otherwise nothing.
struct Traffic {
  std::atomic<uint64_t> exchanges{0}, steps{0}, messages{0}, bytes{0};
};

// What leaders send each other in the steps of a plan.
struct StepContent {
  // Appends what this host sends in a step: after what has come in the steps before it has been taken.
  std::function<void(size_t step, std::vector<char>* bytes)> pack;
  // Takes what another one has sent in it; false when it cannot have.
  std::function<bool(size_t step, const FromHost& from, const std::vector<char>& bytes)> take;
  std::function<size_t(size_t step, const FromHost& from)> max_bytes;
};

// Who waits for a leader that waits for other hosts gives it time to say for whom. More than the leader's own grace.
constexpr double rank_grace_s = 2.0;  // beyond the deadline

class HostNegotiation {
 public:
  explicit HostNegotiation(Group& group);

  // Before this host's ranks are waited for.
  void begin(uint32_t sequence) { begin(sequence, FrameType::headers, own_steps_); }
  // Now and then while they are.
  void still_waiting(const Deadline& deadline);
  // With the slots of this host's ranks filled, fills those of all others.
  void fill_slots(Deadline& deadline);
  // After a failure of either: who was sent a part of a frame could not read a word after it.
  void give_up();
  // In an operation that the exchange `sequence` has agreed on: what else travels between leaders. All of them call it
  // with steps that fit together.
  void run_steps(uint32_t sequence, const std::vector<DisseminationStep>& steps, const StepContent& content,
                 Deadline& deadline);
  const Traffic& traffic() const { return traffic_; }

 private:
  // One frame on its way to another leader.
  struct Outgoing {
    int rank;
    Connection* connection;
    const std::vector<char>* bytes;
    bool needed;  // by the other side; otherwise it may have left
    size_t sent;
  };
  // On its way from another leader.
  struct Incoming {
    size_t step;
    FromHost from;
    int rank;
    Connection* connection;
    Frame frame{};
    size_t frame_got = 0;
    std::vector<char> body;
    size_t body_got = 0;
    bool ready = false;  // worth a look at its connection
    bool received = false;
  };

  void begin(uint32_t sequence, FrameType type, const std::vector<DisseminationStep>& steps);
  void run(const StepContent& content, Deadline& deadline);
  void start(size_t step);
  // Moves what can be moved until the first `wanted` messages are there and, with `all_sent`, none is left to send.
  void move_until(size_t wanted, bool all_sent, Deadline& deadline);
  bool send();
  bool receive(Incoming& incoming);
  void wait(size_t wanted, Deadline& deadline);
  void announce_waiting();
  void mark(const HostRange& range, bool known);  // in known_hosts_
  std::vector<int> ranks_of(const HostRange& range) const;
  std::vector<int> missing() const;
  std::vector<int> unexplained(size_t wanted, const Deadline& deadline) const;
  std::set<int> mid_frame() const;

  Group& group_;
  const Topology& topology_;
  const std::vector<DisseminationStep> own_steps_;  // of headers
  Traffic traffic_;

  uint32_t sequence_ = 0;
  FrameType type_ = FrameType::none;  // of what travels now
  const std::vector<DisseminationStep>* steps_ = nullptr;
  const StepContent* content_ = nullptr;
  std::vector<Incoming> incoming_;  // in the order of the steps
  std::deque<Outgoing> outgoing_;
  std::deque<std::vector<char>> frames_;  // their bytes
  std::vector<bool> known_hosts_;         // hosts from which nothing is awaited
  bool announced_ = false;                // that we wait
};

}  // namespace cc
