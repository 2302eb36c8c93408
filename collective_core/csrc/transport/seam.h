// The seam between the engine and the network: what another network library would implement.
//
// Data moves in three ways, each behind its own door:
//   shm/       between ranks of a host: plain loads and stores in memory that they share (host_memory.h, arena.h,
//              cross_memory.h), with nothing virtual on the way of a small message
//   this file  between hosts: byte streams for negotiation and failure detector, and for tensors segments whose memory
//              is posted and completed, so that a network that reads and writes memory itself (verbs, UCX, io_uring)
//              copies nothing in between. Another library is one file: tcp/ gives byte streams, over which
//              StreamSender and StreamReceiver move segments; tests/memory_transport.h is the smallest of that kind,
//              and in tests/posted_transport.h a thread plays the network card
//   external/  a library that moves whole tensors, MPI or NCCL
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/topology.h"

namespace cc {

// What a transport can be waited for on.
class Endpoint {
 public:
  Endpoint() = default;
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;
  virtual ~Endpoint() = default;
};

// An ordered, reliable stream of bytes to another rank and back.
class Connection : public Endpoint {
 public:
  // Move what can be moved now. Return the number of bytes, 0 when the connection is not ready, -1 when the peer is
  // gone.
  virtual ptrdiff_t send(const void* bytes, size_t n) = 0;
  // Sends what is left of `head` followed by `body`, of which `sent` bytes in all have gone, in one packet if possible:
  // a head on its own would wake the receiver twice.
  virtual ptrdiff_t send(const void* head, size_t head_size, const void* body, size_t body_size, size_t sent) = 0;
  virtual ptrdiff_t receive(void* bytes, size_t n) = 0;
  // The same, but the bytes stay to be received.
  virtual ptrdiff_t peek(void* bytes, size_t n) = 0;
  // Whether the peer's system has all that was sent, or there is no peer any more.
  virtual bool is_delivered() = 0;
};

// partial: a sum of the first ranks, or on a mesh one rank's values.
enum class Part : uint32_t { none = 0, partial = 1, result = 2 };

struct SegmentHead {
  uint32_t sequence;  // of the operation
  Part part;
  uint64_t begin;   // element of the tensor
  uint64_t length;  // elements
};

// Segments of tensors to another rank, each a head and a body, in order.
class Sender : public Endpoint {
 public:
  // The body must stay as it is until this segment is completed, or cancelled.
  virtual void post(const SegmentHead& head, const void* body, size_t bytes) = 0;
  // Moves what can be moved now. Returns the number of bytes or completions, 0 when there are none, -1 when the peer is
  // gone.
  virtual ptrdiff_t progress() = 0;
  // Ends all that is posted: afterwards no body is read, and nothing more can be sent.
  virtual void cancel() = 0;
  virtual Endpoint& endpoint() { return *this; }  // to be waited for

  // Of all segments so far. They complete in order.
  uint64_t posted() const { return posted_; }
  uint64_t completed() const { return completed_; }

 protected:
  uint64_t posted_ = 0, completed_ = 0;
};

// Segments from another rank, one after the other: the receiver says where the body goes when it has seen the head.
class Receiver : public Endpoint {
 public:
  // The head of the next segment, or null while it has not come.
  virtual const SegmentHead* head() const = 0;
  // Once per segment, after its head.
  virtual void post(void* body, size_t bytes) = 0;
  virtual bool is_posted() const = 0;
  // Whether the body is there; then `next` makes way for the segment after it.
  virtual bool is_completed() const = 0;
  virtual void next() = 0;
  virtual ptrdiff_t progress() = 0;  // as Sender
  // Afterwards the body is not written, and nothing more can be received.
  virtual void cancel() = 0;
  virtual Endpoint& endpoint() { return *this; }
};

// Over a byte stream: a head, then its body.
class StreamSender final : public Sender {
 public:
  explicit StreamSender(std::unique_ptr<Connection> connection) : connection_(std::move(connection)) {}
  void post(const SegmentHead& head, const void* body, size_t bytes) override;
  ptrdiff_t progress() override;
  void cancel() override { queue_.clear(); }
  Endpoint& endpoint() override { return *connection_; }

 private:
  struct Posted {
    SegmentHead head;
    const void* body;
    size_t bytes;
  };
  const std::unique_ptr<Connection> connection_;
  std::deque<Posted> queue_;
  size_t sent_ = 0;  // bytes of the first, its head included
};

class StreamReceiver final : public Receiver {
 public:
  explicit StreamReceiver(std::unique_ptr<Connection> connection) : connection_(std::move(connection)) {}
  const SegmentHead* head() const override { return got_ < sizeof head_ ? nullptr : &head_; }
  void post(void* body, size_t bytes) override;
  bool is_posted() const override { return body_ != nullptr; }
  bool is_completed() const override { return body_ && got_ == sizeof head_ + bytes_; }
  void next() override;
  ptrdiff_t progress() override;
  void cancel() override { next(); }
  Endpoint& endpoint() override { return *connection_; }

 private:
  const std::unique_ptr<Connection> connection_;
  SegmentHead head_{};
  char* body_ = nullptr;
  size_t bytes_ = 0;  // of the body
  size_t got_ = 0;    // bytes, the head included
};

// What a connection is for.
//   local    between every two ranks of a host (unix socket): passes the shared memory, then stays open only so that
//            its hang-up tells that the other process ended
//   control  between the first ranks ("leaders") of every two hosts: headers, small payloads, announced failures
//   data     from local rank k of each host to local rank k of the next host, for k < channels, and of every other one
//            ("mesh") where all have equally many ranks and they are not too many: tensors, over one connection or
//            several
enum class Purpose : uint8_t { none = 0, local = 1, control = 2, data = 3 };

struct PlannedConnection {  // seen from this rank
  int peer;
  Purpose purpose;
  int channel;  // of several data connections
  bool operator<(const PlannedConnection& o) const {
    return std::tie(peer, purpose, channel) < std::tie(o.peer, o.purpose, o.channel);
  }
};

struct ConnectionPlan {
  std::vector<PlannedConnection> outgoing;
  std::set<PlannedConnection> incoming;
};
// The higher rank calls the lower one; a data connection is called by its sender. `sockets`: data connections from one
// rank to another.
ConnectionPlan plan_connections(const Topology& topology, int sockets);

struct Connections {
  std::map<int, Fd> local;                             // by rank
  std::map<int, std::unique_ptr<Connection>> control;  // by the other leader's rank
  // Data to a rank, and from one.
  std::map<int, std::vector<std::unique_ptr<Sender>>> to;
  std::map<int, std::vector<std::unique_ptr<Receiver>>> from;

  // Byte streams, not for local ones. `outgoing`: this rank has called.
  void add(const PlannedConnection& planned, bool outgoing, std::unique_ptr<Connection> connection);
  // Ends of one for data that is none.
  void add(const PlannedConnection& planned, std::unique_ptr<Sender> sender);
  void add(const PlannedConnection& planned, std::unique_ptr<Receiver> receiver);
};

enum class PollEvent : uint8_t { receive, send };
struct PollEntry {
  Endpoint* endpoint;  // null: none
  PollEvent event;
  bool ready = false;  // also where the peer is gone
};

class Transport {
 public:
  Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;
  virtual ~Transport() = default;

  // Opens the connections of plan_connections, once; all ranks do so together. Throws Failure(timeout) naming the ranks
  // that did not connect within `seconds`. The connections must be gone before the transport.
  virtual Connections connect(const Topology& topology, int sockets, double seconds) = 0;
  // Waits until one of them is ready, at most so many milliseconds. Returns whether any is.
  virtual bool poll(std::vector<PollEntry>& entries, int milliseconds) = 0;
  // Tells the network of memory in which many segments will lie; of other memory they travel, too, by a copy. What is
  // returned ends before the memory does, and from then on the network does not touch it. Byte streams need none.
  virtual std::shared_ptr<void> register_memory(void* /*begin*/, size_t /*bytes*/) { return nullptr; }
};

}  // namespace cc
