// Opens the authenticated connections between ranks, then closes the listeners.
//
//   local    between every two ranks of a host (unix socket): passes the shared memory, then stays open only so that
//            its hang-up tells that the other process ended
//   control  between the first ranks ("leaders") of every two hosts (TCP): headers, small payloads, announced failures
//   data     from local rank k of each host to local rank k of the next host, for k < channels (TCP): slices of
//            tensors, over one connection or several
//
// Every rank listens in a thread of its own while it connects to others, so no order of arrival can deadlock.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/topology.h"
#include "transport/tcp/sockets.h"

namespace cc {

struct Connections {
  std::map<int, Fd> local;    // by rank
  std::map<int, Fd> control;  // by the other leader's rank
  std::vector<Fd> to_next;    // data to the next host in the ring, where this rank has a channel
  std::vector<Fd> from_previous;
};

struct Listeners {
  Fd tcp;
  Fd unix_socket;
  int port = 0;
  std::string socket_name;
};

// An empty address: no TCP.
Listeners open_listeners(const std::string& address);

// Throws Failure(timeout) naming the ranks that did not connect within `seconds`.
// sockets: data connections to the next host.
Connections connect_all(const Topology& topology, Listeners listeners, const std::string& secret, double seconds,
                        int sockets);

}  // namespace cc
