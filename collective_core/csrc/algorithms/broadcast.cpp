// Broadcast of N bytes from one root: shared memory inside a host, a chain of hosts between them, or a tree where they
// are but one chunk (few_steps.cpp).
//
// Hosts form a chain that starts at the root's host and follows the ring. Per chunk of chunk_bytes:
//   1. the writer fills its buffer in[c % 2]: on the root's host the root, on other hosts the leader, from the network;
//      unless the next host is the root's, it sends each segment on while it receives the next one;
//   2. barrier of the host;
//   3. the leader of the root's host sends the chunk to the next host's leader; all others copy it out.
// in[c % 2] is filled again for chunk c + 2, after the barrier of c + 1, which every rank reaches when it has read
// chunk c.
//
// Bytes: N over each of the H - 1 links; segments follow each other, so the time is N / bandwidth plus H - 2 segments
// of latency. Inside a host the root's N are read once and written once per rank, through the cache.
#include <algorithm>

#include "algorithms/slice_streams.h"

namespace cc {
namespace {

// What one of the connections carries of a chunk: from the previous host, or to the next one, or both.
class ChunkStream : public SliceStream {
 public:
  // `begin`: of the chunk. `part`: of `buffer`, in which the chunk is.
  ChunkStream(const DataPhase& phase, int number, bool receives, bool sends, char* buffer, uint64_t begin,
              const Slice& part)
      : SliceStream(phase, phase.group.next_rank(), phase.group.previous_rank(), number),
        sends_(sends),
        buffer_(buffer),
        begin_(begin),
        end_(part.begin + part.length),
        received_(receives ? part.begin : end_) {
    for (size_t at = part.begin; sends && !receives && at < end_; at += next_length(at)) post(at);
  }
  bool done() const override { return !wants_to_receive() && !wants_to_send(); }
  bool wants_to_receive() const override { return received_ < end_; }
  bool wants_to_send() const override { return outgoing.completed() < outgoing.posted(); }

 private:
  size_t next_length(size_t at) const { return std::min(segment_bytes, end_ - at); }
  void post(size_t at) {
    const size_t length = next_length(at);
    outgoing.post({operation_.header.sequence, Part::result, begin_ + at, length}, buffer_ + at, length);
  }
  void advance() override {
    if (wants_to_receive()) receive_next();
    if (wants_to_send()) send();
  }
  void receive_next() {
    const SegmentHead* head = arrived();
    if (!head) return;
    const size_t length = next_length(received_);
    if (head->sequence != operation_.header.sequence || head->begin != begin_ + received_ || head->length != length)
      unexpected_segment();
    if (!receive(buffer_ + received_, length)) return;
    if (sends_) post(received_);
    received_ += length;
  }

  const bool sends_;
  char* const buffer_;
  const uint64_t begin_;
  const size_t end_;
  size_t received_;
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
    if (topology.rank == root) kernels().copy(buffer, static_cast<const char*>(source) + begin, length);
    const auto pass = [&](bool receives, bool sends) {
      if (in_few_steps) return broadcast_step(phase, root_host, buffer, length, sends);
      const int sockets = static_cast<int>(group.connections().to.at(group.next_rank()).size());
      SliceStreams streams;
      for (int number = 0; number < sockets; ++number) {
        const Slice part = slice_of(length, number, sockets, 1);
        streams.push_back(std::make_unique<ChunkStream>(phase, number, receives, sends, buffer, begin, part));
      }
      run_streams(group, streams, deadline);
    };
    if (topology.rank == writer && !here) pass(true, passes_on && !in_few_steps);
    group.step_barrier(deadline, in_few_steps ? rank_grace_s : barrier_grace_s);
    if (passes_on && (here || in_few_steps)) pass(false, true);
    if (topology.rank != root) kernels().copy(static_cast<char*>(target) + begin, buffer, length);
  }
}

}  // namespace cc
