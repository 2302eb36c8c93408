// Slices of a tensor on their way between hosts, one per connection, all moved by one thread.
//
// A worker's slice is cut into as many streams as it has connections to its neighbours (COLLECTIVE_SOCKETS): one
// connection fills the link between two machines of a rack, but clouds hold each to a part of it, and over long ways
// TCP's window does.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "algorithms/collectives.h"

namespace cc {

// Large enough that a system call's cost vanishes, small enough that a tensor has many in flight and a segment stays in
// cache.
constexpr size_t segment_bytes = size_t(256) << 10;

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

// Where a slice lies on this host.
struct SliceBuffers {
  uint64_t begin;                   // element of the tensor
  size_t length;                    // elements
  std::vector<const char*> inputs;  // of this host's ranks, in their order
  std::vector<char*> outputs;       // where the result goes: may be the inputs
  bool attaches = false;            // they are this rank's alone: those of the others take cross-memory attach

  SliceBuffers part(const Slice& slice, size_t element) const;
};

// One connection to the next host and one from the previous host, and the segments of a slice on them.
class SliceStream {
 public:
  // `number`: of the connection. `staging`: of as many bytes as run_slice was told.
  SliceStream(const DataPhase& phase, int number, char* staging, const SliceBuffers& slice);
  virtual ~SliceStream() = default;

  // Moves what can be moved now; returns whether anything was.
  virtual bool step() = 0;
  virtual bool done() const = 0;
  // What to wait for after a step that moved nothing.
  virtual bool wants_to_receive() const = 0;
  virtual bool wants_to_send() const = 0;

  Connection &to_next, &from_previous;

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
  char* const staging_;
  const SliceBuffers slice_;
};

// Moves a slice over all connections, each of which takes a part of it with a stream of its own.
using MakeStream = std::unique_ptr<SliceStream> (*)(const DataPhase& phase, int number, char* staging,
                                                    const SliceBuffers& slice);
void run_slice(const DataPhase& phase, MakeStream make, size_t staging_bytes, const SliceBuffers& slice);
// A function for `make`.
template <class Stream>
std::unique_ptr<SliceStream> make_stream(const DataPhase& phase, int number, char* staging, const SliceBuffers& slice) {
  return std::make_unique<Stream>(phase, number, staging, slice);
}

}  // namespace cc
