#include "algorithms/ring_streams.h"

#include <algorithm>

namespace cc {
namespace {

// Looks at the connections before it sleeps in poll(), about 0.3 us each: a segment is often just being copied by the
// peer.
constexpr int tries_on_own_core = 50;

// Runs them all to their end.
void run_streams(Group& group, const std::vector<std::unique_ptr<SliceStream>>& streams, Deadline& deadline) {
  const int tries = group.wait_policy().spins >= own_core.spins ? tries_on_own_core : 1;
  std::vector<PollEntry> waiting;
  for (int idle = 0;;) {
    bool moved = false, done = true;
    for (const auto& stream : streams) {
      if (stream->done()) continue;
      moved = stream->step() || moved;
      done = done && stream->done();
    }
    if (done) return;
    if (moved) {
      deadline.extend();
      idle = 0;
      continue;
    }
    if (++idle < tries) continue;
    waiting.clear();
    for (const auto& stream : streams) {
      if (stream->done()) continue;
      if (stream->wants_to_receive()) waiting.push_back({&stream->from_previous, PollEvent::receive});
      if (stream->wants_to_send()) waiting.push_back({&stream->to_next, PollEvent::send});
    }
    const bool receiving = std::any_of(waiting.begin(), waiting.end(),
                                       [](const PollEntry& entry) { return entry.event == PollEvent::receive; });
    group.wait_for(waiting, receiving ? group.previous_rank() : group.next_rank(), deadline);
  }
}

}  // namespace

SliceBuffers SliceBuffers::part(const Slice& slice, size_t element) const {
  SliceBuffers buffers{begin + slice.begin, slice.length, inputs, outputs, attaches};
  for (const char*& input : buffers.inputs) input += slice.begin * element;
  for (char*& output : buffers.outputs) output += slice.begin * element;
  return buffers;
}

SliceStream::SliceStream(const DataPhase& phase, int number, char* staging, const SliceBuffers& slice)
    : to_next(*phase.group.connections().to_next[static_cast<size_t>(number)]),
      from_previous(*phase.group.connections().from_previous[static_cast<size_t>(number)]),
      group_(phase.group),
      topology_(phase.topology()),
      operation_(phase.operation),
      reduction_(reduction_of(phase.operation)),
      element_(size_of(phase.header().dtype)),
      staging_(staging),
      slice_(slice) {}

bool SliceStream::send(Outgoing& out) {
  bool moved = false;
  while (out.sent < sizeof out.head + out.size) {
    const ptrdiff_t n = to_next.send(&out.head, sizeof out.head, out.bytes, out.size, out.sent);
    if (n < 0) group_.failure_detector().lost(group_.next_rank());
    if (n == 0) break;
    out.sent += static_cast<size_t>(n);
    moved = true;
  }
  return moved;
}

size_t SliceStream::take(char* target, size_t size) {
  const ptrdiff_t n = from_previous.receive(target, size);
  if (n < 0) group_.failure_detector().lost(group_.previous_rank());
  return static_cast<size_t>(n);
}

// The peer is authenticated, so this is not about malice: a wrong head would be a bug, and must not become wrong sums.
void SliceStream::unexpected_segment() const {
  throw Failure(Fault::internal,
                topology_.describe(group_.previous_rank()) + " sent a segment out of turn (internal error)",
                {group_.previous_rank()});
}

void run_slice(const DataPhase& phase, MakeStream make, size_t staging_bytes, const SliceBuffers& slice) {
  const size_t element = size_of(phase.header().dtype);
  const int most = static_cast<int>(phase.group.connections().to_next.size());
  char* staging = phase.group.staging(staging_bytes * static_cast<size_t>(most));
  std::vector<std::unique_ptr<SliceStream>> streams;
  for (int number = 0; number < most; ++number) {
    char* own = staging + static_cast<size_t>(number) * staging_bytes;
    streams.push_back(make(phase, number, own, slice.part(slice_of(slice.length, number, most, element), element)));
  }
  run_streams(phase.group, streams, phase.deadline);
}

}  // namespace cc
