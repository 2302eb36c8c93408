// Broadcast of N bytes from one root: shared memory inside a host, a chain of hosts between them, or a tree where they
// are but one chunk (few_steps.cpp).
//
// Hosts form a chain that starts at the root's host and follows the ring. Per chunk of chunk_bytes:
//   1. the writer fills its buffer in[c % 2]: on the root's host the root, on other hosts the leader, from the network;
//   2. barrier of the host;
//   3. the leader sends the chunk to the next host's leader, unless that is the root's host; all others copy it out.
// in[c % 2] is filled again for chunk c + 2, after the barrier of c + 1, which every rank reaches when it has read
// chunk c.
//
// Bytes: N over each of the H - 1 links; chunks follow each other, so the time is N / bandwidth plus H - 2 chunks of
// latency. Inside a host the root's N are read once and written once per rank, through the cache.
#include <algorithm>
#include <cstring>

#include "algorithms/slice_streams.h"

namespace cc {
namespace {

// A chunk on its way to the next host, or from the previous one.
class ChunkStream : public SliceStream {
 public:
  ChunkStream(const DataPhase& phase, bool sends, char* buffer, const SegmentHead& head)
      : SliceStream(phase, phase.group.next_rank(), phase.group.previous_rank(), 0),
        sends_(sends),
        buffer_(buffer),
        head_(head) {
    if (sends) outgoing.post(head, buffer, head.length);
  }
  bool done() const override { return sends_ ? outgoing.completed() == outgoing.posted() : received_; }
  bool wants_to_receive() const override { return !sends_; }
  bool wants_to_send() const override { return sends_; }

 private:
  void advance() override {
    if (sends_) return send();
    const SegmentHead* head = arrived();
    if (!head) return;
    if (head->sequence != head_.sequence || head->begin != head_.begin || head->length != head_.length)
      unexpected_segment();
    received_ = receive(buffer_, head_.length);
  }

  const bool sends_;
  char* const buffer_;
  const SegmentHead head_;
  bool received_ = false;
};

}  // namespace

void broadcast(const DataPhase& phase) {
  const Operation& operation = phase.operation;
  uint64_t chunk = 0;
  broadcast_bytes(phase, operation.header.root, operation.input, operation.output, operation.header.bytes(), &chunk);
}

void broadcast_bytes(const DataPhase& phase, int root, const void* source, void* target, uint64_t bytes,
                     uint64_t* chunk) {
  Group& group = phase.group;
  Deadline& deadline = phase.deadline;
  const Topology& topology = phase.topology();
  const uint64_t chunk_bytes = group.memory().layout().chunk_bytes;
  const int root_host = topology.host_of(root);
  const int hosts = topology.host_count();
  const bool here = root_host == topology.host;
  const int writer = here ? root : topology.local_ranks()[0];
  const int writer_local = static_cast<int>(
      std::find(topology.local_ranks().begin(), topology.local_ranks().end(), writer) - topology.local_ranks().begin());
  const bool in_few_steps = hosts > 2 && bytes <= chunk_bytes;
  const bool passes_on =
      topology.is_leader() && hosts > 1 && (in_few_steps || (topology.host + 1) % hosts != root_host);

  for (uint64_t begin = 0; begin < bytes; begin += chunk_bytes, ++*chunk) {
    const size_t length = static_cast<size_t>(std::min(chunk_bytes, bytes - begin));
    char* buffer = group.memory().in(writer_local, *chunk);
    if (topology.rank == root) std::memcpy(buffer, static_cast<const char*>(source) + begin, length);
    const auto pass = [&](bool sends) {
      if (in_few_steps) return broadcast_step(phase, root_host, buffer, length, sends);
      SliceStreams one;
      one.push_back(std::make_unique<ChunkStream>(phase, sends, buffer,
                                                  SegmentHead{phase.header().sequence, Part::result, begin, length}));
      run_streams(group, one, deadline);
    };
    if (topology.rank == writer && !here) pass(false);
    group.step_barrier(deadline, in_few_steps ? rank_grace_s : barrier_grace_s);
    if (passes_on) pass(true);
    if (topology.rank != root) std::memcpy(static_cast<char*>(target) + begin, buffer, length);
  }
}

}  // namespace cc
