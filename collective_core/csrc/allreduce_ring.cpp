// Allreduce of a large tensor among H hosts: reduce-scatter over slices and all-gather, on a ring of hosts, in rank
// order.
//
// A textbook ring starts each slice at another host, so elements of different slices are summed in different orders,
// which depend on the tensor's size. Here every partial sum starts at host 0 and travels 0 -> 1 -> ... -> H-1; each
// host adds its ranks' values one after the other. The last host holds the sum in rank order, rounds it once and sends
// it on around the ring, H-1 -> 0 -> 1 -> ... -> H-2. Slices go in parallel: local rank k of every host is the worker
// of slice k on a ring of its own (K = channels() rings); segments of a slice follow each other, so that all links are
// busy at once.
//
// Per chunk of the tensor:
//   1. every rank copies its chunk into its buffer in[c % 2]; barrier;
//   2. worker k moves slice k around its ring into out[c % 2]; barrier;
//   3. every rank copies out[c % 2] into its tensor. (The barrier of the next step 1 protects the buffers.)
//
// Network, per tensor of N bytes, all rings of a host together:
//   host 0 and the hosts 1..H-3 send 2N, host H-2 and host H-1 send N; nobody sends or receives more than 2N. The
//   rotated ring sends 2(H-1)/H N: the same for H = 2, where the two N go in opposite directions at the same time, a
//   half more for H = 3, and less and less for larger H. Half types: partial sums travel as float32, so 2N + N.
//   Latency: 2(H-1) hops of one segment.
//
// Buffers: in and out as in allreduce_local.cpp; per worker one staging area of a slice in the accumulator's type, so
// that a received segment always has its place: no flow control, and no cycle of full buffers that could block the
// ring.
//
// Order: ((x0 + x1) + x2) + ... over all ranks in Topology::order, for every element; chunk, slice and segment do not
// matter.
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "collectives.h"

namespace cc {
namespace {

// Large enough that a system call's cost vanishes, small enough that a chunk has many in flight and a segment stays in
// cache.
constexpr size_t segment_bytes = size_t(64) << 10;
constexpr size_t segments_ahead = 4;  // partial sums that host 0 prepares while earlier ones leave

// Looks at the sockets before it sleeps in poll(), about 0.3 us each: a segment is often just being copied by the peer.
constexpr int tries_on_own_core = 50;

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

// One worker's slice of one chunk on its way around the ring.
class SliceOnRing {
 public:
  SliceOnRing(Group& group, const Operation& operation, Deadline& deadline, std::vector<char>& staging, uint64_t chunk,
              uint64_t chunk_begin, Slice slice)
      : group_(group),
        topology_(group.topology()),
        operation_(operation),
        deadline_(deadline),
        reduction_(reduction_of(operation.header, operation.contributors)),
        element_(size_of(operation.header.dtype)),
        accumulator_(accumulator_size_of(operation.header.dtype)),
        staging_(staging.data()),
        chunk_(chunk),
        tensor_begin_(chunk_begin + slice.begin),
        slice_(slice),
        host_(topology_.host),
        last_(topology_.host_count() - 1),
        to_next_(group.connections().to_next.get()),
        from_previous_(group.connections().from_previous.get()),
        segment_(segment_bytes / accumulator_) {}

  void run() {
    const size_t results_wanted = host_ == last_ ? 0 : slice_.length;
    const int tries = group_.patience().spins >= own_core.spins ? tries_on_own_core : 1;
    int idle = 0;
    for (;;) {
      bool moved = false;
      if (host_ == 0 && summed_ < slice_.length && queue_.size() < segments_ahead) {
        add_own(summed_, std::min(segment_, slice_.length - summed_));
        moved = true;
      }
      const bool receiving = (host_ > 0 && summed_ < slice_.length) || results_ < results_wanted;
      if (receiving) moved = receive() || moved;
      if (!queue_.empty()) moved = send() || moved;
      if (summed_ == slice_.length && results_ == results_wanted && queue_.empty()) return;
      if (moved) {
        deadline_.extend();
        idle = 0;
        continue;
      }
      if (++idle < tries) continue;
      const bool wants_input = (host_ > 0 && summed_ < slice_.length) || results_ < results_wanted;
      if (wants_input) {
        group_.wait_for_socket(from_previous_, POLLIN, group_.previous_rank(), deadline_,
                               queue_.empty() ? -1 : to_next_, POLLOUT);
      } else {
        group_.wait_for_socket(to_next_, POLLOUT, group_.next_rank(), deadline_);
      }
    }
  }

 private:
  char* staged(size_t at) { return staging_ + at * accumulator_; }
  char* result(size_t at) { return group_.out(chunk_) + (slice_.begin + at) * element_; }

  void enqueue(Part part, size_t at, size_t length, const char* bytes, size_t width) {
    queue_.push_back({{operation_.header.sequence, part, tensor_begin_ + at, length}, bytes, length * width, 0});
  }

  // Adds this host's ranks to the partial sum of `length` elements from `at`, and passes it on.
  void add_own(size_t at, size_t length) {
    std::vector<const void*> sources(static_cast<size_t>(topology_.local_size()));
    for (int r = 0; r < topology_.local_size(); ++r) {
      sources[r] = group_.in(r, chunk_) + (slice_.begin + at) * element_;
    }
    kernels().accumulate(reduction_, staged(at), host_ == 0, sources.data(), topology_.local_size(), length);
    summed_ = at + length;
    if (host_ < last_) return enqueue(Part::partial, at, length, staged(at), accumulator_);
    kernels().finish(reduction_, result(at), staged(at), length);
    enqueue(Part::result, at, length, result(at), element_);
  }

  bool receive() {
    if (head_got_ < sizeof head_) {
      const ptrdiff_t n = take(reinterpret_cast<char*>(&head_) + head_got_, sizeof head_ - head_got_);
      head_got_ += static_cast<size_t>(n);
      if (head_got_ < sizeof head_) return n > 0;
      check_head();
      body_got_ = 0;
    }
    const size_t at = static_cast<size_t>(head_.begin - tensor_begin_);
    const size_t length = static_cast<size_t>(head_.length);
    const bool partial = head_.part == Part::partial;
    char* target = partial ? staged(at) : result(at);
    const size_t size = length * (partial ? accumulator_ : element_);
    const ptrdiff_t n = take(target + body_got_, size - body_got_);
    body_got_ += static_cast<size_t>(n);
    if (body_got_ < size) return n > 0;
    head_got_ = 0;
    if (partial) {
      add_own(at, length);
    } else {
      results_ = at + length;
      if ((host_ + 1) % topology_.host_count() != last_) enqueue(Part::result, at, length, target, element_);
    }
    return true;
  }

  ptrdiff_t take(char* target, size_t size) {
    const ptrdiff_t n = receive_some(from_previous_, target, size);
    if (n < 0) group_.liveness().lost(group_.previous_rank());
    return n;
  }

  // The peer is authenticated, so this is not about malice: a wrong head would be a bug, and must not become wrong
  // sums.
  void check_head() {
    const size_t expected = head_.part == Part::partial ? summed_ : results_;
    if (head_.sequence != operation_.header.sequence || head_.begin != tensor_begin_ + expected || head_.length == 0 ||
        head_.length > slice_.length - expected) {
      throw Failure(Fault::internal,
                    topology_.describe(group_.previous_rank()) + " sent a segment out of turn (internal error)",
                    {group_.previous_rank()});
    }
  }

  bool send() {
    Outgoing& out = queue_.front();
    bool moved = false;
    while (out.sent < sizeof out.head + out.size) {
      const ptrdiff_t n = send_some(to_next_, &out.head, sizeof out.head, out.bytes, out.size, out.sent);
      if (n < 0) group_.liveness().lost(group_.next_rank());
      if (n == 0) return moved;
      out.sent += static_cast<size_t>(n);
      moved = true;
    }
    queue_.pop_front();
    return true;
  }

  Group& group_;
  const Topology& topology_;
  const Operation& operation_;
  Deadline& deadline_;
  const Reduction reduction_;
  const size_t element_, accumulator_;
  char* const staging_;
  const uint64_t chunk_, tensor_begin_;
  const Slice slice_;
  const int host_, last_, to_next_, from_previous_;
  const size_t segment_;

  std::deque<Outgoing> queue_;
  size_t summed_ = 0;   // elements that contain this host's values
  size_t results_ = 0;  // elements whose final value has arrived
  SegmentHead head_{};
  size_t head_got_ = 0, body_got_ = 0;
};

}  // namespace

void allreduce_ring(Group& group, const Operation& operation, Deadline& deadline) {
  const Header& header = operation.header;
  const Topology& topology = group.topology();
  const size_t element = size_of(header.dtype);
  const uint64_t chunk_elements = group.layout().chunk_bytes / element;
  const int workers = topology.channels();
  const char* input = static_cast<const char*>(operation.input);
  char* output = static_cast<char*>(operation.output);
  std::vector<char> staging;

  uint64_t chunk = 0;
  for (uint64_t begin = 0; begin < header.count; begin += chunk_elements, ++chunk) {
    const size_t length = static_cast<size_t>(std::min(chunk_elements, header.count - begin));
    std::memcpy(group.in(topology.local_rank, chunk), input + begin * element, length * element);
    group.step_barrier(deadline);
    if (topology.local_rank < workers) {
      const Slice slice = slice_of(length, topology.local_rank, workers, element);
      staging.resize(std::max(staging.size(), slice.length * accumulator_size_of(header.dtype)));
      SliceOnRing(group, operation, deadline, staging, chunk, begin, slice).run();
    }
    group.step_barrier(deadline);
    std::memcpy(output + begin * element, group.out(chunk), length * element);
  }
}

}  // namespace cc
