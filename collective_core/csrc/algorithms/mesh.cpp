// Allreduce and reduce-scatter of large tensors among H hosts that all have a mesh, rank k of each with rank k of the
// others (worker k): of slice k host h owns the h-th part.
//
//   1. every host sends each other host its values of the part that this one owns, segment after segment: its rank's
//      or, with several ranks, the sum of their values in their order, which it forms just before;
//   2. the owner adds a segment when it has it from all hosts, in their order, and rounds it once;
//   3. allreduce: it sends the sum to all others, before further values, while it is in cache.
// Host h sends to h + 1 first, then to h + 2, ..., so that the hosts do not all send to one of them at a time. All
// connections move at once; one whose next segment cannot be added yet is left alone until the other hosts' are there.
// That cannot block: a host always has values to send, and takes whatever it still needs for its own sum.
//
// Network, for a tensor of N bytes: 2 (H-1)/H N sent and received by every host, which is the least, and half of it for
// a reduce-scatter: half types take half of what float32 takes. Latency: two segments.
//
// Buffers: a segment of every host; of several ranks the segment that is sent to a host, one of another rank
// (host_buffers.h), and one of float32 in which half types are summed. Results go straight to their place.
//
// Order: host by host, and within a host rank by rank: ((x0 + x1) + ...) + ((xp + x(p+1)) + ...) + ... for every
// element, which with a rank per host is the rank order; slice, part, segment and connection do not matter. Half types
// are summed in float32 within a host and among hosts; the sum of a host with several ranks is rounded once, to travel.
#include <algorithm>
#include <memory>
#include <vector>

#include "algorithms/host_buffers.h"
#include "algorithms/slice_streams.h"

namespace cc {
namespace {

// Smaller ones among many hosts, so that those that are added together stay in cache.
size_t mesh_segment_bytes(int hosts) {
  constexpr size_t least = size_t(64) << 10, all_together = size_t(1) << 20;
  const size_t share = all_together / static_cast<size_t>(hosts - 1) / cache_line * cache_line;
  return std::min(segment_bytes, std::max(least, share));
}

// The values of a host that travel: those of its rank, or sums of its ranks'.
class HostValues {
 public:
  // `block`: memory for a segment, and then for as many accumulators.
  HostValues(const DataPhase& phase, const HostBuffers& of_host, char* block)
      : buffers(of_host),
        phase_(phase),
        element_(size_of(phase.header().dtype)),
        of_ranks_(reduction_within(phase)),
        of_hosts_(reduction_among_hosts(phase)),
        block_(block),
        accumulators_(block + mesh_segment_bytes(phase.topology().host_count())) {}

  // `length` of them from element `at` on: where they lie, or in `staging`.
  const char* get(size_t at, size_t length, char* staging) const {
    if (phase_.topology().local_size() == 1) return buffers.inputs[0] + at * element_;
    const bool half = is_half(of_ranks_.dtype);
    char* sum = half ? accumulators_ : staging;
    buffers.add_to(sum, true, of_ranks_, at, length, phase_, block_);
    if (half) kernels().finish(of_ranks_, staging, sum, length);
    return staging;
  }
  // out = the hosts' values, added in their order, and rounded.
  void reduce(void* out, const std::vector<const void*>& hosts, size_t length) const {
    kernels().reduce(of_hosts_, out, hosts.data(), static_cast<int>(hosts.size()), length);
  }

  const HostBuffers& buffers;

 private:
  const DataPhase& phase_;
  const size_t element_;
  const Reduction of_ranks_, of_hosts_;
  char* const block_;
  char* const accumulators_;
};

// The part of this host's own that the connections of one number carry.
class OwnPart {
 public:
  // `result`: where its sum goes.
  OwnPart(const DataPhase& phase, const HostValues& values, const Slice& part, char* result, char* staging)
      : slice(part),
        values_(values),
        result_(result),
        element_(size_of(phase.header().dtype)),
        host_(phase.topology().host),
        segment_(mesh_segment_bytes(phase.topology().host_count()) / element_),
        sources_(phase.topology().hosts.size()),
        staging_(staging) {}

  size_t segment() const { return segment_; }  // elements
  // Where the segment of a host goes that is to be added next.
  char* staging_of(int host) const { return staging_ + static_cast<size_t>(host) * segment_ * element_; }
  const char* result(size_t at) const { return result_ + at * element_; }
  size_t summed() const { return summed_; }

  // One more host's segment is there. Returns whether all are, and have been added.
  bool add(size_t length) {
    if (++here_ + 1 < sources_.size()) return false;
    here_ = 0;
    for (size_t host = 0; host < sources_.size(); ++host) sources_[host] = staging_of(static_cast<int>(host));
    sources_[static_cast<size_t>(host_)] = values_.get(slice.begin + summed_, length, staging_of(host_));
    values_.reduce(result_ + summed_ * element_, sources_, length);
    summed_ += length;
    return true;
  }

  const Slice slice;  // of the host's buffers

 private:
  const HostValues& values_;
  char* const result_;
  const size_t element_;
  const int host_;
  const size_t segment_;
  std::vector<const void*> sources_;
  char* const staging_;
  size_t here_ = 0;    // hosts whose segment is there
  size_t summed_ = 0;  // elements
};

// What goes between this host and another one.
class MeshStream : public SliceStream {
 public:
  // `theirs`: the part that the other host owns. `wants_results`: of an allreduce. `staging`: for sums to send.
  MeshStream(const DataPhase& phase, int host, int number, const HostValues& values, OwnPart& own, const Slice& theirs,
             bool wants_results, char* staging)
      : SliceStream(phase, partner_on(phase, host), partner_on(phase, host), number),
        phase_(phase),
        host_(host),
        values_(values),
        own_(own),
        theirs_(theirs),
        wants_results_(wants_results),
        staging_(staging) {}

  bool done() const override {
    return is_received() && is_idle() && asked_ == theirs_.length &&
           (!wants_results_ || answered_ == own_.slice.length);
  }
  bool wants_to_receive() const override { return !is_received() && !must_wait(); }
  bool wants_to_send() const override { return !is_idle(); }
  bool is_owed() const override { return got_values_ == own_.summed() && got_values_ < own_.slice.length; }

 private:
  static int partner_on(const DataPhase& phase, int host) {
    return phase.topology().hosts[host][phase.topology().local_rank];
  }
  bool is_received() const {
    return got_values_ == own_.slice.length && (!wants_results_ || got_results_ == theirs_.length);
  }
  bool is_idle() const { return outgoing.completed() == outgoing.posted(); }
  // The next thing to receive are values, and those before them have not been added yet.
  bool must_wait() const {
    const SegmentHead* head = incoming.head();
    return head && !incoming.is_posted() && head->part == Part::partial && got_values_ > own_.summed();
  }

  void advance() override {
    if (wants_to_receive()) receive_next();
    if (is_idle()) choose();
    if (!is_idle()) send();
  }

  // The next segment to send, if there is one.
  void choose() {
    if (wants_results_ && answered_ < own_.summed()) {
      // As they were added: a receiver expects segments of one length, but for the last.
      const size_t length = std::min(own_.segment(), own_.slice.length - answered_);
      begin(Part::result, own_.slice, own_.result(answered_), length * element_, length, &answered_);
    } else if (asked_ < theirs_.length) {
      const size_t length = std::min(own_.segment(), theirs_.length - asked_);
      const char* values = values_.get(theirs_.begin + asked_, length, staging_);
      begin(Part::partial, theirs_, values, length * element_, length, &asked_);
    }
  }
  void begin(Part part, const Slice& of, const char* bytes, size_t size, size_t length, size_t* done) {
    outgoing.post({operation_.header.sequence, part, values_.buffers.begin + of.begin + *done, length}, bytes, size);
    *done += length;
  }

  void receive_next() {
    const SegmentHead* arriving = arrived();
    if (!arriving) return;
    const SegmentHead head = *arriving;
    if (!incoming.is_posted()) check(head);
    if (must_wait()) return;
    const auto length = static_cast<size_t>(head.length);
    if (head.part == Part::partial) {
      if (!receive(own_.staging_of(host_), length * element_)) return;
      got_values_ += length;
      const size_t before = own_.summed();
      if (own_.add(length) && wants_results_) values_.buffers.spread(own_.slice.begin + before, length, phase_);
    } else {
      const size_t at = theirs_.begin + got_results_;
      if (!receive(values_.buffers.outputs[0] + at * element_, length * element_)) return;
      got_results_ += length;
      values_.buffers.spread(at, length, phase_);
    }
  }

  void check(const SegmentHead& head) const {
    const bool values = head.part == Part::partial;
    const Slice& of = values ? own_.slice : theirs_;
    const size_t before = values ? got_values_ : got_results_;
    if (head.sequence != operation_.header.sequence || (!values && (head.part != Part::result || !wants_results_)) ||
        before == of.length || head.begin != values_.buffers.begin + of.begin + before ||
        head.length != std::min(own_.segment(), of.length - before)) {
      unexpected_segment();
    }
  }

  const DataPhase& phase_;
  const int host_;
  const HostValues& values_;
  OwnPart& own_;
  const Slice theirs_;
  const bool wants_results_;
  char* const staging_;

  size_t asked_ = 0;        // elements of their part that were sent
  size_t answered_ = 0;     // elements of the own one whose sums were sent
  size_t got_values_ = 0;   // elements of the own one that have come
  size_t got_results_ = 0;  // elements of their part whose sums have come
};

// `parts`: of the buffers, by owner. `sum`: where that of this host goes.
void run_mesh(const DataPhase& phase, const HostBuffers& buffers, const std::vector<Slice>& parts, char* sum,
              bool wants_results) {
  const Topology& topology = phase.topology();
  const auto hosts = static_cast<size_t>(topology.host_count());
  const auto me = static_cast<size_t>(topology.host);
  const size_t element = size_of(phase.header().dtype), segment = mesh_segment_bytes(topology.host_count());
  const size_t sockets = phase.group.connections().to.at(phase.group.next_rank()).size();
  const bool are_sums = topology.local_size() > 1;
  // Of a connection: segments of all hosts, and those to send to all others.
  const size_t own_bytes = segment * hosts * (are_sums ? 2 : 1);
  char* staging = phase.group.staging(own_bytes * sockets + segment * 3);
  const HostValues values(phase, buffers, staging + own_bytes * sockets);
  const auto part_of = [&](size_t host, size_t number) {
    const Slice part = slice_of(parts[host].length, static_cast<int>(number), static_cast<int>(sockets), element);
    return Slice{parts[host].begin + part.begin, part.length};
  };
  std::vector<std::unique_ptr<OwnPart>> own;
  SliceStreams streams;
  for (size_t number = 0; number < sockets; ++number) {
    const Slice part = part_of(me, number);
    char* segments = staging + number * own_bytes;
    own.push_back(
        std::make_unique<OwnPart>(phase, values, part, sum + (part.begin - parts[me].begin) * element, segments));
    for (size_t k = 1; k < hosts; ++k) {
      const size_t host = (me + k) % hosts;
      char* to_send = are_sums ? segments + (hosts + host) * segment : nullptr;
      streams.push_back(std::make_unique<MeshStream>(phase, static_cast<int>(host), static_cast<int>(number), values,
                                                     *own.back(), part_of(host, number), wants_results, to_send));
    }
  }
  run_streams(phase.group, streams, phase.deadline);
}

void move_slice(const DataPhase& phase, const HostBuffers& buffers) {
  const Topology& topology = phase.topology();
  const size_t element = size_of(phase.header().dtype);
  std::vector<Slice> parts(topology.hosts.size());
  for (int host = 0; host < topology.host_count(); ++host)
    parts[host] = slice_of(buffers.length, host, topology.host_count(), element);
  run_mesh(phase, buffers, parts, buffers.outputs[0] + parts[topology.host].begin * element, true);
}

}  // namespace

Reduction reduction_within(const DataPhase& phase) {
  Reduction reduction = reduction_of(phase.operation);
  reduction.divisor = 1;
  reduction.postscale = 1.0;
  if (!is_half(reduction.dtype)) return reduction;
  const bool flips = reduction.prescale < 0;
  reduction.prescale = 1.0;
  if (reduction.op == ReduceOp::min || reduction.op == ReduceOp::max) {
    if (flips) reduction.op = reduction.op == ReduceOp::min ? ReduceOp::max : ReduceOp::min;
    return reduction;
  }
  while (reduction.postscale * phase.topology().local_size() > 1) reduction.postscale /= 2;
  return reduction;
}

Reduction reduction_among_hosts(const DataPhase& phase) {
  Reduction reduction = reduction_of(phase.operation);
  if (phase.topology().local_size() == 1) return reduction;
  if (!is_half(reduction.dtype)) reduction.prescale = 1.0;
  reduction.postscale /= reduction_within(phase).postscale;
  return reduction;
}

void allreduce_mesh(const DataPhase& phase) {
  run_between_hosts(phase, move_slice);
}

void reducescatter_mesh(const DataPhase& phase) {
  if (!all_accessible(phase)) return reducescatter_by_allreduce(phase);
  const Header& header = phase.header();
  const Topology& topology = phase.topology();
  const auto rows = static_cast<uint64_t>(header.dims[0]);
  const uint64_t row = header.count / rows;
  std::vector<Slice> parts;
  for (const std::vector<int>& ranks : topology.hosts) {
    const Rows owned = rows_of(rows, ranks[topology.local_rank], topology.size);
    parts.push_back({static_cast<size_t>(owned.begin * row), static_cast<size_t>(owned.length * row)});
  }
  run_in_place(phase, [&](const HostBuffers& buffers) {
    run_mesh(phase, buffers, parts, static_cast<char*>(phase.operation.output), false);
  });
}

}  // namespace cc
