// The seam between the engine and the network: what another network library would implement.
//
// Data moves in three ways, each behind its own door:
//   shm/       between ranks of a host: plain loads and stores in memory that they share (host_memory.h, arena.h,
//              cross_memory.h), with nothing virtual on the way of a small message
//   this file  between hosts: byte streams, which negotiation, failure detector and algorithms connect, send on,
//              receive from and poll. tcp/ implements it, and UCX or libfabric would; tests/memory_transport.h is the
//              smallest one
//   external/  a library that moves whole tensors, MPI or NCCL
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <vector>

#include "base/fd.h"
#include "base/topology.h"

namespace cc {

// An ordered, reliable stream of bytes to another rank and back.
class Connection {
 public:
  Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  virtual ~Connection() = default;

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

// What a connection is for.
//   local    between every two ranks of a host (unix socket): passes the shared memory, then stays open only so that
//            its hang-up tells that the other process ended
//   control  between the first ranks ("leaders") of every two hosts: headers, small payloads, announced failures
//   data     from local rank k of each host to local rank k of the next host, for k < channels, and from every host to
//            every other one ("mesh") where each has one rank and they are not too many: tensors, over one connection
//            or several
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
  std::map<int, std::vector<std::unique_ptr<Connection>>> to, from;

  // Not for local ones. `outgoing`: this rank has called.
  void add(const PlannedConnection& planned, bool outgoing, std::unique_ptr<Connection> connection);
};

enum class PollEvent : uint8_t { receive, send };
struct PollEntry {
  Connection* connection;  // null: none
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
};

}  // namespace cc
