#include "algorithms/slice_streams.h"

#include <algorithm>
#include <set>

namespace cc {
namespace {

// Looks at a connection before it sleeps in poll(), about 0.3 us each: a segment is often just being copied by the
// peer.
constexpr size_t tries_on_own_core = 50;

// Of a rank that waits for what others may be unable to send before a third one has sent them something: they say who
// that is. Less than the grace of hosts that are in the next negotiation already (host_negotiation.cpp), which wait for
// this one.
constexpr double owing_grace_s = 0.5;  // beyond the deadline

struct Missing {
  std::vector<int> ranks;
  double grace;
};

// The ranks without which nothing moves.
Missing missing_ranks(const SliceStreams& streams) {
  std::set<int> owing, silent, deaf;
  for (const auto& stream : streams) {
    if (stream->done()) continue;
    if (stream->is_owed()) owing.insert(stream->from);
    if (stream->wants_to_receive()) silent.insert(stream->from);
    if (stream->wants_to_send()) deaf.insert(stream->to);
  }
  const std::set<int>& ranks = !owing.empty() ? owing : !silent.empty() ? silent : deaf;
  return {{ranks.begin(), ranks.end()}, owing.empty() ? owing_grace_s : 0};
}

void run(Group& group, const SliceStreams& streams, Deadline& deadline) {
  const size_t tries = group.wait_policy().spins >= own_core.spins ? tries_on_own_core / streams.size() : 1;
  std::vector<PollEntry> waiting;
  for (size_t idle = 0;;) {
    bool moved = false, done = true;
    for (const auto& stream : streams) {
      if (stream->done()) continue;
      moved = stream->step() || moved;
      done = done && stream->done();
    }
    if (done) return;
    if (moved) {
      group.note_progress(deadline);
      idle = 0;
      continue;
    }
    if (++idle < tries) continue;
    waiting.clear();
    for (const auto& stream : streams) {
      if (stream->done()) continue;
      if (stream->wants_to_receive()) waiting.push_back({&stream->incoming.endpoint(), PollEvent::receive});
      if (stream->wants_to_send()) waiting.push_back({&stream->outgoing.endpoint(), PollEvent::send});
    }
    const Missing missing = missing_ranks(streams);
    group.wait_for(waiting, missing.ranks, deadline, missing.grace);
  }
}

}  // namespace

void run_streams(Group& group, const SliceStreams& streams, Deadline& deadline) {
  try {
    run(group, streams, deadline);
  } catch (...) {
    for (const auto& stream : streams) {
      stream->outgoing.cancel();
      stream->incoming.cancel();
    }
    throw;
  }
}

SliceStream::SliceStream(const DataPhase& phase, int to_rank, int from_rank, int number)
    : to(to_rank),
      from(from_rank),
      outgoing(*phase.group.connections().to.at(to)[static_cast<size_t>(number)]),
      incoming(*phase.group.connections().from.at(from)[static_cast<size_t>(number)]),
      group_(phase.group),
      topology_(phase.topology()),
      operation_(phase.operation),
      reduction_(reduction_of(phase.operation)),
      element_(size_of(phase.header().dtype)) {}

bool SliceStream::step() {
  moved_ = false;
  advance();
  return moved_;
}

void SliceStream::send() {
  const ptrdiff_t n = outgoing.progress();
  if (n < 0) group_.failure_detector().lost(to);
  moved_ = moved_ || n > 0;
}

void SliceStream::receive_some() {
  const ptrdiff_t n = incoming.progress();
  if (n < 0) group_.failure_detector().lost(from);
  moved_ = moved_ || n > 0;
}

const SegmentHead* SliceStream::arrived() {
  if (!incoming.head()) receive_some();
  return incoming.head();
}

bool SliceStream::receive(void* target, size_t bytes) {
  if (!incoming.is_posted()) incoming.post(target, bytes);
  receive_some();
  if (!incoming.is_completed()) return false;
  incoming.next();
  return true;
}

// The peer is authenticated, so this is not about malice: a wrong head would be a bug, and must not become wrong sums.
void SliceStream::unexpected_segment() const {
  throw Failure(Fault::internal, topology_.describe(from) + " sent a segment out of turn (internal error)", {from});
}

}  // namespace cc
