// Allreduce of a large tensor among H hosts with several ranks, or too many hosts for a mesh (mesh.cpp): reduce-scatter
// over slices and all-gather, on a ring of hosts, in rank order.
//
// A textbook ring starts each slice at another host, so elements of different slices are summed in different orders,
// which depend on the tensor's size. Here every partial sum starts at host 0 and travels 0 -> 1 -> ... -> H-1; each
// host adds its ranks' values one after the other. The last host holds the sum in rank order, rounds it once and sends
// it on around the ring, H-1 -> 0 -> 1 -> ... -> H-2. Slices go in parallel: local rank k of every host is the worker
// of slice k on a ring of its own (K = channels() rings); segments of a slice follow each other, so that all links are
// busy at once.
//
// Where the tensors lie meanwhile: host_buffers.h.
//
// Network, per tensor of N bytes, all rings of a host together:
//   host 0 and the hosts 1..H-3 send 2N, host H-2 and host H-1 send N; nobody sends or receives more than 2N. The
//   rotated ring sends 2(H-1)/H N: the same for H = 2, where the two N go in opposite directions at the same time, a
//   half more for H = 3, and less and less for larger H. To add strictly in rank order takes the partial sums through
//   the chain of hosts, so an inner host cannot do with less than N of them and N of results; to send every rank's
//   values to the owner of a slice, as mesh.cpp does, would take p(H-1)/H N with p ranks per host, and results.
//   Half types: partial sums travel as float32, so 2N + N. Latency: 2(H-1) hops of one segment.
//
// Buffers: a segment of another rank; a window of partial sums that wait to be sent on; a host takes no further partial
// sum while its window is full. That cannot block the ring: the last host turns partial sums into results at once, and
// results go straight to their place, so the chain of hosts always drains at its end.
//
// Order: ((x0 + x1) + x2) + ... over all ranks in Topology::order, for every element; chunk, slice and segment do not
// matter.
#include <algorithm>
#include <array>
#include <vector>

#include "algorithms/host_buffers.h"
#include "algorithms/slice_streams.h"

namespace cc {
namespace {

constexpr size_t window = 4;                                    // partial sums that are ready and not sent yet
constexpr size_t staging_bytes = (window + 1) * segment_bytes;  // of a stream: they, and a segment of another rank

// A slice on its way around the ring.
class RingStream : public SliceStream {
 public:
  RingStream(const DataPhase& phase, int number, char* staging, const HostBuffers& slice)
      : SliceStream(phase, phase.group.next_rank(), phase.group.previous_rank(), number),
        phase_(phase),
        slice_(slice),
        staging_(staging),
        accumulator_(accumulator_size_of(phase.header().dtype)),
        host_(topology_.host),
        last_(topology_.host_count() - 1),
        segment_(segment_bytes / accumulator_) {}

  bool done() const override { return summed_ == slice_.length && !is_receiving() && !wants_to_send(); }
  bool wants_to_receive() const override { return is_receiving() && !must_send_first(); }
  bool wants_to_send() const override { return outgoing.completed() < outgoing.posted(); }

 private:
  void advance() override {
    if (host_ == 0 && summed_ < slice_.length && partials() < window) {
      add_own(summed_, std::min(segment_, slice_.length - summed_));
      moved_ = true;
    }
    if (is_receiving()) receive_next();
    if (wants_to_send()) send();
  }
  bool is_receiving() const {
    return (host_ > 0 && summed_ < slice_.length) || (host_ < last_ && results_ < slice_.length);
  }
  // The next thing to receive is a partial sum, for which there is no room.
  bool must_send_first() const {
    const SegmentHead* head = incoming.head();
    return head && !incoming.is_posted() && head->part == Part::partial && partials() >= window;
  }
  // Partial sums that have not been sent yet.
  size_t partials() const {
    return static_cast<size_t>(std::count_if(partials_.begin(), partials_.end(),
                                             [&](uint64_t number) { return number > outgoing.completed(); }));
  }

  // A partial sum's slot in the window: segments take turns.
  char* staged(size_t at) { return staging_ + at / segment_ % window * segment_bytes; }
  char* result(size_t at) { return slice_.outputs[0] + at * element_; }

  void pass_on(Part part, size_t at, size_t length, const char* bytes, size_t width) {
    outgoing.post({operation_.header.sequence, part, slice_.begin + at, length}, bytes, length * width);
    if (part == Part::partial) partials_[at / segment_ % window] = outgoing.posted();
  }

  // Adds this host's ranks to the partial sum of `length` elements from `at`, and passes it on.
  void add_own(size_t at, size_t length) {
    summed_ = at + length;
    const bool as_it_is = host_ == 0 && topology_.local_size() == 1 && accumulator_ == element_ &&
                          reduction_.prescale == 1.0 && reduction_.dtype != DType::boolean;
    if (as_it_is) return pass_on(Part::partial, at, length, slice_.inputs[0] + at * element_, accumulator_);
    slice_.add_to(staged(at), host_ == 0, reduction_of(phase_.operation), at, length, phase_,
                  staging_ + window * segment_bytes);
    if (host_ < last_) return pass_on(Part::partial, at, length, staged(at), accumulator_);
    kernels().finish(reduction_, result(at), staged(at), length);
    pass_on(Part::result, at, length, result(at), element_);
    slice_.spread(at, length, phase_);
  }

  void receive_next() {
    const SegmentHead* arriving = arrived();
    if (!arriving || must_send_first()) return;
    const SegmentHead head = *arriving;
    if (!incoming.is_posted()) check(head);
    const bool partial = head.part == Part::partial;
    const size_t at = static_cast<size_t>(head.begin - slice_.begin), length = static_cast<size_t>(head.length);
    char* target = partial ? staged(at) : result(at);
    if (!receive(target, length * (partial ? accumulator_ : element_))) return;
    if (partial) return add_own(at, length);
    results_ = at + length;
    slice_.spread(at, length, phase_);
    if ((host_ + 1) % topology_.host_count() != last_) pass_on(Part::result, at, length, target, element_);
  }

  void check(const SegmentHead& head) const {
    const size_t expected = head.part == Part::partial ? summed_ : results_;
    if (head.sequence != operation_.header.sequence || head.begin != slice_.begin + expected || head.length == 0 ||
        head.length > slice_.length - expected || head.length > segment_) {
      unexpected_segment();
    }
  }

  const DataPhase& phase_;
  const HostBuffers slice_;
  char* const staging_;
  const size_t accumulator_;  // bytes of an element of a partial sum
  const int host_, last_;
  const size_t segment_;

  std::array<uint64_t, window> partials_{};  // by slot of the window: the number of the segment that was sent from it
  size_t summed_ = 0;                        // elements that contain this host's values
  size_t results_ = 0;                       // elements whose final value has arrived
};

// Over all connections, each of which takes a part of the slice.
void run_ring(const DataPhase& phase, const HostBuffers& slice) {
  const size_t element = size_of(phase.header().dtype);
  const int most = static_cast<int>(phase.group.connections().to.at(phase.group.next_rank()).size());
  char* staging = phase.group.staging(staging_bytes * static_cast<size_t>(most));
  SliceStreams streams;
  for (int number = 0; number < most; ++number) {
    char* own = staging + static_cast<size_t>(number) * staging_bytes;
    const Slice part = slice_of(slice.length, number, most, element);
    streams.push_back(std::make_unique<RingStream>(phase, number, own, slice.part(part, element)));
  }
  run_streams(phase.group, streams, phase.deadline);
}

}  // namespace

void allreduce_ring(const DataPhase& phase) {
  run_between_hosts(phase, run_ring);
}

}  // namespace cc
