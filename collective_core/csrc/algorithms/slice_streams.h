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

// partial: a sum of the first ranks, or on a mesh one rank's values.
enum class Part : uint32_t { none = 0, partial = 1, result = 2 };

struct SegmentHead {
  uint32_t sequence;  // of the operation
  Part part;
  uint64_t begin;   // element of the tensor
  uint64_t length;  // elements
};

struct Outgoing {
  SegmentHead head;
  const char* bytes;
  size_t size;
  size_t sent;  // of head and bytes together
};

// What goes to one rank and comes from one rank, which may be the same, over the connections of one number.
class SliceStream {
 public:
  SliceStream(const DataPhase& phase, int to, int from, int number);
  virtual ~SliceStream() = default;

  // Moves what can be moved now; returns whether anything was.
  virtual bool step() = 0;
  virtual bool done() const = 0;
  // What to wait for after a step that moved nothing.
  virtual bool wants_to_receive() const = 0;
  virtual bool wants_to_send() const = 0;
  // Whether nothing but `from` is to blame that it has not come.
  virtual bool is_owed() const { return wants_to_receive(); }

  const int to, from;  // ranks
  Connection &outgoing, &incoming;

 protected:
  // Sends of `out` what fits; returns whether anything did.
  bool send(Outgoing& out);
  // Receives at most `size` bytes; returns how many.
  size_t take(char* target, size_t size);
  [[noreturn]] void unexpected_segment() const;

  Group& group_;
  const Topology& topology_;
  const Operation& operation_;
  const Reduction reduction_;
  const size_t element_;  // bytes
};

using SliceStreams = std::vector<std::unique_ptr<SliceStream>>;

// Runs them all to their end.
void run_streams(Group& group, const SliceStreams& streams, Deadline& deadline);

}  // namespace cc
