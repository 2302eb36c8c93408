#include "algorithms/ring_streams.h"

#include <poll.h>

#include <algorithm>

namespace cc {
namespace {

// Looks at the sockets before it sleeps in poll(), about 0.3 us each: a segment is often just being copied by the peer.
constexpr int tries_on_own_core = 50;

}  // namespace

SlicePlace SlicePlace::part(const Slice& slice, size_t element) const {
  SlicePlace place{begin + slice.begin, slice.length, inputs, outputs};
  for (const char*& input : place.inputs) input += slice.begin * element;
  for (char*& output : place.outputs) output += slice.begin * element;
  return place;
}

Lane::Lane(Group& group, const Operation& operation, int number, char* staging, const SlicePlace& slice)
    : to_next(group.connections().to_next[static_cast<size_t>(number)].get()),
      from_previous(group.connections().from_previous[static_cast<size_t>(number)].get()),
      group_(group),
      topology_(group.topology()),
      operation_(operation),
      reduction_(reduction_of(operation.header, operation.contributors)),
      element_(size_of(operation.header.dtype)),
      staging_(staging),
      slice_(slice) {}

bool Lane::send(Outgoing& out) {
  bool moved = false;
  while (out.sent < sizeof out.head + out.size) {
    const ptrdiff_t n = send_some(to_next, &out.head, sizeof out.head, out.bytes, out.size, out.sent);
    if (n < 0) group_.liveness().lost(group_.next_rank());
    if (n == 0) break;
    out.sent += static_cast<size_t>(n);
    moved = true;
  }
  return moved;
}

size_t Lane::take(char* target, size_t size) {
  const ptrdiff_t n = receive_some(from_previous, target, size);
  if (n < 0) group_.liveness().lost(group_.previous_rank());
  return static_cast<size_t>(n);
}

// The peer is authenticated, so this is not about malice: a wrong head would be a bug, and must not become wrong sums.
void Lane::out_of_turn() const {
  throw Failure(Fault::internal,
                topology_.describe(group_.previous_rank()) + " sent a segment out of turn (internal error)",
                {group_.previous_rank()});
}

void run_lanes(Group& group, const std::vector<std::unique_ptr<Lane>>& lanes, Deadline& deadline) {
  const int tries = group.patience().spins >= own_core.spins ? tries_on_own_core : 1;
  std::vector<pollfd> waiting;
  for (int idle = 0;;) {
    bool moved = false, done = true;
    for (const auto& lane : lanes) {
      if (lane->done()) continue;
      moved = lane->step() || moved;
      done = done && lane->done();
    }
    if (done) return;
    if (moved) {
      deadline.extend();
      idle = 0;
      continue;
    }
    if (++idle < tries) continue;
    waiting.clear();
    for (const auto& lane : lanes) {
      if (lane->done()) continue;
      if (lane->wants_to_receive()) waiting.push_back({lane->from_previous, POLLIN, 0});
      if (lane->wants_to_send()) waiting.push_back({lane->to_next, POLLOUT, 0});
    }
    const bool receiving =
        std::any_of(waiting.begin(), waiting.end(), [](const pollfd& p) { return p.events == POLLIN; });
    group.wait_for_sockets(waiting, receiving ? group.previous_rank() : group.next_rank(), deadline);
  }
}

}  // namespace cc
