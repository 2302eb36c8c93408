// Segments of tensors on their way between hosts, over several connections at the same time, all moved by one thread.
//
// What goes between two ranks is cut into as many streams as they have connections (COLLECTIVE_SOCKETS): one connection
// fills the link between two machines of a rack, but clouds hold each to a part of it, and over long ways TCP's window
// does.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "algorithms/collectives.h"

namespace cc {

// Large enough that a system call's cost vanishes, small enough that a tensor has many in flight and a segment stays in
// cache.
constexpr size_t segment_bytes = size_t(256) << 10;

// What goes to one rank and comes from one rank, which may be the same, over the connections of one number.
class SliceStream {
 public:
  SliceStream(const DataPhase& phase, int to, int from, int number);
  virtual ~SliceStream() = default;

  // Moves what can be moved now; returns whether anything was.
  bool step();
  virtual bool done() const = 0;
  // What to wait for after a step that moved nothing.
  virtual bool wants_to_receive() const = 0;
  virtual bool wants_to_send() const = 0;
  // Whether nothing but `from` is to blame that it has not come.
  virtual bool is_owed() const { return wants_to_receive(); }

  const int to, from;  // ranks
  Sender& outgoing;
  Receiver& incoming;

 protected:
  // Posts and takes what can be, and between that calls send() and receive().
  virtual void advance() = 0;
  void send();
  // The head of the next segment, once it is there.
  const SegmentHead* arrived();
  // Whether its body is in `target`; then the next one can arrive.
  bool receive(void* target, size_t bytes);
  [[noreturn]] void unexpected_segment() const;

  Group& group_;
  const Topology& topology_;
  const Operation& operation_;
  const Reduction reduction_;
  const size_t element_;  // bytes
  bool moved_ = false;    // in this step

 private:
  void receive_some();
};

using SliceStreams = std::vector<std::unique_ptr<SliceStream>>;

// Runs them all to their end. Where it throws the network touches none of their memory any more.
void run_streams(Group& group, const SliceStreams& streams, Deadline& deadline);

}  // namespace cc
