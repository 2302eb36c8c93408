// Allreduce and reduce-scatter of large tensors among H hosts with one rank each, which all have connections to each
// other: host k owns slice k.
//
//   1. every host sends each other host its values of the slice that this one owns, segment after segment;
//   2. the owner adds a segment when it has it from all hosts, in rank order, and rounds it once;
//   3. allreduce: it sends the sum to all others, before further values, while it is in cache.
// Host h sends to h + 1 first, then to h + 2, ..., so that the hosts do not all send to one of them at a time. All
// connections move at once; one whose next segment cannot be added yet is left alone until the other hosts' are there.
// That cannot block: a host always has values to send, and takes whatever it still needs for its own sum.
//
// Network, for a tensor of N bytes: 2 (H-1)/H N sent and received by every host, which is the least, and half of it for
// a reduce-scatter. Values travel as they are, so half types take half of what float32 takes. Latency: two segments.
// With several ranks per host the owner would need the values of each of them: they take the ring (allreduce_ring.cpp).
//
// Buffers: a segment of each other host. Results go straight to their place.
//
// Order: ((x0 + x1) + x2) + ... for every element; slice, segment and connection do not matter.
#include <algorithm>
#include <memory>
#include <vector>

#include "algorithms/slice_streams.h"

namespace cc {
namespace {

// Smaller ones among many hosts, so that those that are added together stay in cache.
size_t mesh_segment_bytes(int hosts) {
  constexpr size_t least = size_t(64) << 10, all_together = size_t(1) << 20;
  const size_t share = all_together / static_cast<size_t>(hosts - 1) / cache_line * cache_line;
  return std::min(segment_bytes, std::max(least, share));
}

// The part of this host's slice that the connections of one number carry.
class OwnPart {
 public:
  OwnPart(const DataPhase& phase, const Slice& part, char* result, char* staging)
      : slice(part),
        result_(result),
        reduction_(reduction_of(phase.operation)),
        element_(size_of(phase.header().dtype)),
        host_(phase.topology().host),
        input_(static_cast<const char*>(phase.operation.input) + part.begin * element_),
        segment_(mesh_segment_bytes(phase.topology().host_count()) / element_),
        sources_(phase.topology().hosts.size()),
        staging_(staging) {}

  size_t segment() const { return segment_; }  // elements
  // Where the segment of another host goes that is to be added next.
  char* staging_of(int host) const { return staging_ + static_cast<size_t>(host) * segment_ * element_; }
  const char* result(size_t at) const { return result_ + at * element_; }
  size_t summed() const { return summed_; }

  // One more host's segment is there.
  void add(size_t length) {
    if (++here_ + 1 < sources_.size()) return;
    here_ = 0;
    for (size_t host = 0; host < sources_.size(); ++host) sources_[host] = staging_of(static_cast<int>(host));
    sources_[static_cast<size_t>(host_)] = input_ + summed_ * element_;
    kernels().reduce(reduction_, result_ + summed_ * element_, sources_.data(), static_cast<int>(sources_.size()),
                     length);
    summed_ += length;
  }

  const Slice slice;  // of the tensor

 private:
  char* const result_;
  const Reduction reduction_;
  const size_t element_;
  const int host_;
  const char* const input_;
  const size_t segment_;
  std::vector<const void*> sources_;
  char* const staging_;
  size_t here_ = 0;    // hosts whose segment is there
  size_t summed_ = 0;  // elements
};

// What goes between this host and another one.
class MeshStream : public SliceStream {
 public:
  // `theirs`: the part of the other host's slice. `results`: where the tensor's sums go, or null where nobody wants
  // them.
  MeshStream(const DataPhase& phase, int host, int number, OwnPart& own, const Slice& theirs, char* results)
      : SliceStream(phase, phase.topology().leader_of(host), phase.topology().leader_of(host), number),
        host_(host),
        own_(own),
        theirs_(theirs),
        results_(results) {}

  bool done() const override {
    return is_received() && is_idle() && asked_ == theirs_.length && (!results_ || answered_ == own_.slice.length);
  }
  bool wants_to_receive() const override { return !is_received() && !must_wait(); }
  bool wants_to_send() const override { return !is_idle(); }
  bool is_owed() const override { return values_ == own_.summed() && values_ < own_.slice.length; }

 private:
  bool is_received() const { return values_ == own_.slice.length && (!results_ || got_results_ == theirs_.length); }
  bool is_idle() const { return outgoing.completed() == outgoing.posted(); }
  // The next thing to receive are values, and those before them have not been added yet.
  bool must_wait() const {
    const SegmentHead* head = incoming.head();
    return head && !incoming.is_posted() && head->part == Part::partial && values_ > own_.summed();
  }

  void advance() override {
    if (wants_to_receive()) receive_next();
    if (is_idle()) choose();
    if (!is_idle()) send();
  }

  // The next segment to send, if there is one.
  void choose() {
    if (results_ && answered_ < own_.summed()) {
      begin(Part::result, own_.slice, own_.result(answered_), &answered_);
    } else if (asked_ < theirs_.length) {
      const char* input = static_cast<const char*>(operation_.input);
      begin(Part::partial, theirs_, input + (theirs_.begin + asked_) * element_, &asked_);
    }
  }
  void begin(Part part, const Slice& of, const char* bytes, size_t* done) {
    const size_t length = std::min(own_.segment(), of.length - *done);
    outgoing.post({operation_.header.sequence, part, of.begin + *done, length}, bytes, length * element_);
    *done += length;
  }

  void receive_next() {
    const SegmentHead* arriving = arrived();
    if (!arriving) return;
    const SegmentHead head = *arriving;
    if (!incoming.is_posted()) check(head);
    if (must_wait()) return;
    const bool values = head.part == Part::partial;
    const auto length = static_cast<size_t>(head.length);
    if (!receive(values ? own_.staging_of(host_) : results_ + head.begin * element_, length * element_)) return;
    (values ? values_ : got_results_) += length;
    if (values) own_.add(length);
  }

  void check(const SegmentHead& head) const {
    const bool values = head.part == Part::partial;
    const Slice& of = values ? own_.slice : theirs_;
    const size_t before = values ? values_ : got_results_;
    if (head.sequence != operation_.header.sequence || (!values && (head.part != Part::result || !results_)) ||
        before == of.length || head.begin != of.begin + before ||
        head.length != std::min(own_.segment(), of.length - before)) {
      unexpected_segment();
    }
  }

  const int host_;
  OwnPart& own_;
  const Slice theirs_;
  char* const results_;

  size_t asked_ = 0;        // elements of their slice that were sent
  size_t answered_ = 0;     // elements of the own one whose sums were sent
  size_t values_ = 0;       // elements of the own one that have come
  size_t got_results_ = 0;  // elements of their slice whose sums have come
};

// `slices`: of the tensor, by owner. `sum`: where that of this host goes. `results`: as in MeshStream.
void run_mesh(const DataPhase& phase, const std::vector<Slice>& slices, char* sum, char* results) {
  const Topology& topology = phase.topology();
  const int hosts = topology.host_count(), me = topology.host;
  const size_t element = size_of(phase.header().dtype);
  const int sockets = static_cast<int>(phase.group.connections().to.at(phase.group.next_rank()).size());
  const size_t own_bytes = mesh_segment_bytes(hosts) * static_cast<size_t>(hosts);
  char* staging = phase.group.staging(own_bytes * static_cast<size_t>(sockets));
  const auto part_of = [&](int host, int number) {
    const Slice& whole = slices[host];
    const Slice part = slice_of(whole.length, number, sockets, element);
    return Slice{whole.begin + part.begin, part.length};
  };
  std::vector<std::unique_ptr<OwnPart>> own;
  SliceStreams streams;
  for (int number = 0; number < sockets; ++number) {
    const Slice part = part_of(me, number);
    char* result = sum + (part.begin - slices[me].begin) * element;
    own.push_back(std::make_unique<OwnPart>(phase, part, result, staging + static_cast<size_t>(number) * own_bytes));
    for (int k = 1; k < hosts; ++k) {
      const int host = (me + k) % hosts;
      streams.push_back(std::make_unique<MeshStream>(phase, host, number, *own.back(), part_of(host, number), results));
    }
  }
  run_streams(phase.group, streams, phase.deadline);
}

}  // namespace

void allreduce_mesh(const DataPhase& phase) {
  const Header& header = phase.header();
  const Topology& topology = phase.topology();
  const size_t element = size_of(header.dtype);
  std::vector<Slice> slices(topology.hosts.size());
  for (int host = 0; host < topology.host_count(); ++host)
    slices[host] = slice_of(header.count, host, topology.host_count(), element);
  char* output = static_cast<char*>(phase.operation.output);
  run_mesh(phase, slices, output + slices[topology.host].begin * element, output);
}

void reducescatter_mesh(const DataPhase& phase) {
  const Header& header = phase.header();
  const Topology& topology = phase.topology();
  const auto rows = static_cast<uint64_t>(header.dims[0]);
  const uint64_t row = header.count / rows;
  std::vector<Slice> slices(topology.hosts.size());
  for (int host = 0; host < topology.host_count(); ++host) {
    const Rows owned = rows_of(rows, topology.leader_of(host), topology.size);
    slices[host] = {static_cast<size_t>(owned.begin * row), static_cast<size_t>(owned.length * row)};
  }
  run_mesh(phase, slices, static_cast<char*>(phase.operation.output), nullptr);
}

}  // namespace cc
