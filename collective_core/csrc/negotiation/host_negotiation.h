// The exchange between hosts: their leaders (first ranks) tell each other what the ranks of all hosts ask for.
//
// Who tells whom and in which round is planned once (dissemination.h), what travels is a block (header_codec.h) in a
// frame on the control connection. Blocks of later rounds are taken as they come. Failures, departures and deaths are
// seen on all control connections, not only on those of the plan, so a death is as near with 200 hosts as with two.
//
// A host that waits cannot tell from silence who is late: its partner may be waiting too, for another host or for a
// rank of its own. So a leader that has waited for a moment says so to all others. Whoever neither was heard of nor
// said it is missing; and one that said it gets the time to find out, and to tell, for whom.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <set>
#include <vector>

#include "core/group.h"
#include "negotiation/dissemination.h"

namespace cc {

// What the exchanges of this rank have cost: of a leader of several hosts, otherwise nothing.
struct Traffic {
  std::atomic<uint64_t> exchanges{0}, rounds{0}, messages{0}, bytes{0};
};

class Leaders {
 public:
  explicit Leaders(Group& group);

  // Before this host's ranks are waited for.
  void begin(uint32_t sequence);
  // Now and then while they are.
  void still_waiting(const Deadline& deadline);
  // With the slots of this host's ranks filled, fills those of all others.
  void fill_slots(Deadline& deadline);
  // After a failure of either: who was sent a part of a frame could not read a word after it.
  void give_up();
  const Traffic& traffic() const { return traffic_; }

 private:
  // One frame on its way to another leader.
  struct Outgoing {
    int rank;
    int fd;
    const std::vector<char>* bytes;
    bool needed;  // by the other side; otherwise it may have left
    size_t sent;
  };
  // One block on its way from another leader.
  struct Incoming {
    FromHost from;
    int rank;
    int fd;
    Frame frame{};
    size_t frame_got = 0;
    std::vector<char> block;
    size_t block_got = 0;
    bool ready = false;  // worth a look at its connection
    bool received = false;
  };

  void start(const Round& round);
  // Moves what can be moved until the first `wanted` blocks are there and, with `all_sent`, no block is left to send.
  void move_until(size_t wanted, bool all_sent, Deadline& deadline);
  bool send();
  bool receive(Incoming& incoming);
  void place(const Incoming& incoming);
  void wait(size_t wanted, Deadline& deadline);
  void say_that_we_wait();
  std::vector<int> ranks_of(const HostRange& range) const;
  std::vector<int> missing() const;
  std::vector<int> unexplained(size_t wanted, const Deadline& deadline) const;
  std::set<int> in_mid_frame() const;

  Group& group_;
  const Topology& topology_;
  const std::vector<Round> rounds_;
  Traffic traffic_;

  uint32_t sequence_ = 0;
  std::vector<Incoming> incoming_;  // in the order of the rounds
  std::deque<Outgoing> outgoing_;
  std::deque<std::vector<char>> frames_;  // their bytes
  std::vector<bool> heard_of_;            // hosts whose headers are here
  bool told_ = false;                     // that we wait
};

}  // namespace cc
