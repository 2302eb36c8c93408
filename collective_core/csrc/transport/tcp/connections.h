// Opens the authenticated connections between ranks, then closes the listeners.
//
// Every rank listens in a thread of its own while it connects to others, so no order of arrival can deadlock.
#pragma once

#include <string>
#include <vector>

#include "base/topology.h"
#include "transport/seam.h"
#include "transport/tcp/sockets.h"

namespace cc {

struct Listeners {
  std::vector<Fd> tcp;  // at one port
  Fd unix_socket;
  int port = 0;
  std::string socket_name;
};

// At these addresses; none: no TCP.
Listeners open_listeners(const std::vector<std::string>& addresses);

// Throws Failure(timeout) naming the ranks that did not connect within `seconds`.
// sockets: data connections from one rank to another.
Connections connect_all(const Topology& topology, Listeners listeners, const std::string& secret, double seconds,
                        int sockets);

}  // namespace cc
