// Allreduce of a large tensor between two hosts with one rank each.
//
// Each host sums one half: it sends its values of the other half, receives the other's values of its own, adds them in
// rank order and sends the result. Both hosts do the same work at the same time, in both directions; a half type
// travels as it is, not as float32. Results go before values, while they are still in cache.
//
// Network: N bytes each way, which is the least. Latency: one segment each way.
// Buffers: one segment of received values. Whatever comes has its place at once, so no host ever waits to receive.
// Order: x0 + x1 for every element.
#include <algorithm>

#include "algorithms/ring_streams.h"

namespace cc {
namespace {

class PairStream : public SliceStream {
 public:
  PairStream(const DataPhase& phase, int number, char* staging, const SliceBuffers& slice)
      : SliceStream(phase, number, staging, slice),
        segment_(segment_bytes / element_),
        mine_(slice_of(slice.length, topology_.host, 2, element_)),
        theirs_(slice_of(slice.length, 1 - topology_.host, 2, element_)) {}

  bool step() override {
    bool moved = !is_received() && receive();
    if (is_idle()) choose();
    if (!is_idle()) moved = send(out_) || moved;
    return moved;
  }
  bool done() const override {
    return is_received() && is_idle() && asked_ == theirs_.length && answered_ == mine_.length;
  }
  bool wants_to_receive() const override { return !is_received(); }
  bool wants_to_send() const override { return !is_idle(); }

 private:
  bool is_received() const { return summed_ == mine_.length && results_ == theirs_.length; }
  bool is_idle() const { return out_.sent == (out_.size ? sizeof out_.head + out_.size : 0); }

  // The next segment to send, if there is one.
  void choose() {
    if (answered_ < summed_) {
      const size_t length = std::min(segment_, summed_ - answered_);
      begin(Part::result, mine_.begin + answered_, length, slice_.outputs[0]);
      answered_ += length;
    } else if (asked_ < theirs_.length) {
      const size_t length = std::min(segment_, theirs_.length - asked_);
      begin(Part::partial, theirs_.begin + asked_, length, slice_.inputs[0]);
      asked_ += length;
    }
  }
  void begin(Part part, size_t at, size_t length, const char* bytes) {
    out_ = {{operation_.header.sequence, part, slice_.begin + at, length}, bytes + at * element_, length * element_, 0};
  }

  bool receive() {
    const size_t before = got_;
    if (got_ < sizeof head_) {
      got_ += take(reinterpret_cast<char*>(&head_) + got_, sizeof head_ - got_);
      if (got_ < sizeof head_) return got_ > before;
      check_head();
    }
    const bool partial = head_.part == Part::partial;
    const size_t at = static_cast<size_t>(head_.begin - slice_.begin), length = static_cast<size_t>(head_.length);
    const size_t body_got = got_ - sizeof head_, size = length * element_;
    char* target = partial ? staging_ : slice_.outputs[0] + at * element_;
    got_ += take(target + body_got, size - body_got);
    if (got_ < sizeof head_ + size) return got_ > before;
    got_ = 0;
    if (partial) {
      add(at, length);
    } else {
      results_ += length;
    }
    return true;
  }

  void add(size_t at, size_t length) {
    const void* own = slice_.inputs[0] + at * element_;
    const void* in_order[2] = {topology_.host == 0 ? own : staging_, topology_.host == 0 ? staging_ : own};
    kernels().reduce(reduction_, slice_.outputs[0] + at * element_, in_order, 2, length);
    summed_ += length;
  }

  void check_head() const {
    const bool partial = head_.part == Part::partial;
    const Slice& half = partial ? mine_ : theirs_;
    const size_t expected = partial ? summed_ : results_;
    if (head_.sequence != operation_.header.sequence || (!partial && head_.part != Part::result) ||
        head_.begin != slice_.begin + half.begin + expected || head_.length == 0 ||
        head_.length > half.length - expected || head_.length > segment_) {
      unexpected_segment();
    }
  }

  const size_t segment_;       // elements
  const Slice mine_, theirs_;  // halves of the slice: summed here, and by the other host

  Outgoing out_{};
  size_t asked_ = 0;     // elements of the other's half that were sent
  size_t summed_ = 0;    // elements of mine that are results
  size_t answered_ = 0;  // of them, sent
  size_t results_ = 0;   // elements of the other's half that have come back
  SegmentHead head_{};
  size_t got_ = 0;  // bytes of the segment that is being received, its head included
};

}  // namespace

void allreduce_pair(const DataPhase& phase) {
  const Operation& operation = phase.operation;
  run_slice(
      phase, make_stream<PairStream>, segment_bytes,
      {0, operation.header.count, {static_cast<const char*>(operation.input)}, {static_cast<char*>(operation.output)}});
}

}  // namespace cc
