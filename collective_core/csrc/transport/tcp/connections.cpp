#include "transport/tcp/connections.h"

#include <poll.h>

#include <atomic>
#include <exception>
#include <future>
#include <list>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "base/interruption.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/tcp_transport.h"

namespace cc {
namespace {

constexpr int poll_ms = 20;  // between looks at the deadline
// Unproven connections held at once, beside those that are expected; the oldest is dropped for a newer one.
constexpr size_t max_strangers = 256;
// Calls taken before those that were taken get a look: a flood of strangers must not push out one that is expected.
constexpr int max_accepted_at_once = 64;

void keep(Connections* connections, const PlannedConnection& planned, bool outgoing, Fd fd) {
  tune_peer_socket(fd.get());
  if (planned.purpose == Purpose::local) {
    connections->local[planned.peer] = std::move(fd);
  } else {
    connections->add(planned, outgoing, std::make_unique<TcpConnection>(std::move(fd)));
  }
}

// Takes calls until all expected ones have proven themselves, `stop` is set, or the deadline passes.
class Acceptor {
 public:
  Acceptor(const Topology& topology, Listeners listeners, std::string secret, std::set<PlannedConnection> expected)
      : topology_(topology),
        listeners_(std::move(listeners)),
        secret_(std::move(secret)),
        missing_(std::move(expected)),
        max_pending_(missing_.size() + max_strangers) {}

  void run(const Deadline& deadline, const std::atomic<bool>& stop) {
    try {
      while (!missing_.empty() && !deadline.passed() && !stop) {
        wait();
        for (const Fd& listener : listeners_.tcp) accept_waiting(listener, false);
        accept_waiting(listeners_.unix_socket, true);
        for (auto pending = pending_.begin(); pending != pending_.end();) {
          pending = is_settled(*pending) ? pending_.erase(pending) : std::next(pending);
        }
      }
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  const std::set<PlannedConnection>& missing() const { return missing_; }
  Connections& accepted() { return accepted_; }
  std::exception_ptr error() const { return error_; }

 private:
  void wait() {
    std::vector<pollfd> waiting;
    waiting.reserve(listeners_.tcp.size() + 1 + pending_.size());
    for (const Fd& listener : listeners_.tcp) waiting.push_back({listener.get(), POLLIN, 0});
    if (listeners_.unix_socket) waiting.push_back({listeners_.unix_socket.get(), POLLIN, 0});
    for (const PendingConnection& pending : pending_) waiting.push_back({pending.fd(), POLLIN, 0});
    poll(waiting.data(), waiting.size(), poll_ms);
  }

  void accept_waiting(const Fd& listener, bool is_local) {
    if (!listener) return;
    for (int taken = 0; taken < max_accepted_at_once; ++taken) {
      Fd fd = accept_now(listener.get());
      if (!fd) return;
      if (is_local && !same_user(fd.get())) continue;
      if (pending_.size() >= max_pending_) pending_.pop_front();
      pending_.emplace_back(std::move(fd), is_local);
    }
  }

  // True when the connection needs no more attention. A stranger is dropped without a word; it is not our error.
  bool is_settled(PendingConnection& pending) {
    switch (pending.advance(secret_, topology_.rank)) {
      case PendingConnection::State::waiting:
        return pending.expired();
      case PendingConnection::State::refused:
        return true;
      case PendingConnection::State::accepted:
        break;
    }
    const PlannedConnection call{pending.hello().from, pending.hello().purpose, pending.hello().channel};
    const bool right_listener = pending.is_local() == (call.purpose == Purpose::local);
    if (right_listener && missing_.count(call) > 0 && pending.admit()) {
      missing_.erase(call);
      keep(&accepted_, call, false, pending.take());
    }
    return true;
  }

  const Topology& topology_;
  Listeners listeners_;
  std::string secret_;
  std::set<PlannedConnection> missing_;
  const size_t max_pending_;
  std::list<PendingConnection> pending_;
  Connections accepted_;
  std::exception_ptr error_;
};

// Of a peer: data connections take its addresses in turn.
const std::string& address_for(const PlannedConnection& call, const Peer& peer) {
  const size_t turn = call.purpose == Purpose::data ? static_cast<size_t>(call.channel) % (peer.rails.size() + 1) : 0;
  return turn ? peer.rails[turn - 1] : peer.address;
}

// Until the peer has let this rank in: who is called by many strangers may hang up on it. One that listens no more
// after that is gone.
Fd enter(const Topology& topology, const PlannedConnection& call, const std::string& secret, const Deadline& deadline) {
  const Peer& peer = topology.peers[call.peer];
  for (double retry_s = refused_retry_s;; retry_s = 0) {
    Fd fd = call.purpose == Purpose::local ? connect_unix(peer.socket_name, deadline, retry_s)
                                           : connect_tcp(address_for(call, peer), peer.port, deadline, retry_s);
    if (call.purpose == Purpose::local && !same_user(fd.get())) {
      throw Failure(Fault::peer_lost, "it runs under another user");
    }
    try {
      authenticate(fd.get(), secret, topology.rank, call.peer, call.purpose, call.channel, deadline);
      return fd;
    } catch (const HungUp&) {
      if (deadline.passed()) throw;
    }
    poll(nullptr, 0, poll_ms);
  }
}

Fd connect_to_peer(const Topology& topology, const PlannedConnection& call, const std::string& secret,
                   const Deadline& deadline) {
  const Peer& peer = topology.peers[call.peer];
  try {
    return enter(topology, call, secret, deadline);
  } catch (const Failure& failure) {
    const bool network = call.purpose != Purpose::local;
    throw Failure(
        failure.fault,
        "no connection to " + topology.describe(call.peer) +
            (network ? " at " + address_for(call, peer) + " port " + std::to_string(peer.port) : "") + ": " +
            failure.what() +
            (network ? "; is a firewall between the hosts, or is this the wrong network (set COLLECTIVE_NETWORK)?"
                     : ""),
        {call.peer});
  }
}

}  // namespace

Listeners open_listeners(const std::vector<std::string>& addresses) {
  constexpr int tries = 20;  // the port that is free at the first address need not be free at the others
  Listeners listeners;
  listeners.unix_socket = listen_unix(&listeners.socket_name);
  for (int tried = 1;; ++tried) {
    try {
      for (const std::string& address : addresses) listeners.tcp.push_back(listen_tcp(address, &listeners.port));
      return listeners;
    } catch (const Failure&) {
      if (listeners.tcp.empty() || tried == tries) throw;
      listeners.tcp.clear();
      listeners.port = 0;
    }
  }
}

Connections connect_all(const Topology& topology, Listeners listeners, const std::string& secret, double seconds,
                        int sockets) {
  const Deadline deadline(seconds);
  const ConnectionPlan plan = plan_connections(topology, sockets);
  allow_descriptors(plan.outgoing.size() + plan.incoming.size());
  std::atomic<bool> stop{false};
  Acceptor acceptor(topology, std::move(listeners), secret, plan.incoming);
  std::promise<void> ended;
  std::thread listening([&] {
    acceptor.run(deadline, stop);
    ended.set_value();
  });

  Connections called;
  std::exception_ptr error;
  try {
    for (const PlannedConnection& call : plan.outgoing)
      keep(&called, call, true, connect_to_peer(topology, call, secret, deadline));
  } catch (...) {
    error = std::current_exception();
    stop = true;
  }
  const std::future<void> end = ended.get_future();
  while (end.wait_for(between_signals) != std::future_status::ready) {
    if (stop || !is_interrupted()) continue;
    error = std::make_exception_ptr(Failure(Fault::interrupted, "a signal has ended the start"));
    stop = true;
  }
  listening.join();
  if (error) std::rethrow_exception(error);
  if (acceptor.error()) std::rethrow_exception(acceptor.error());
  if (!acceptor.missing().empty()) {
    std::set<int> ranks;
    for (const PlannedConnection& call : acceptor.missing()) ranks.insert(call.peer);
    const std::vector<int> missing(ranks.begin(), ranks.end());
    throw Failure(Fault::timeout,
                  "start: " + topology.describe(missing) + " did not connect to " + topology.describe(topology.rank) +
                      " within " + std::to_string(static_cast<int>(seconds)) +
                      " s; is a firewall between the hosts, or is this the wrong network (set COLLECTIVE_NETWORK)?",
                  missing);
  }
  Connections all = std::move(acceptor.accepted());
  for (auto& entry : called.local) all.local[entry.first] = std::move(entry.second);
  for (auto& entry : called.control) all.control[entry.first] = std::move(entry.second);
  all.to = std::move(called.to);
  return all;
}

}  // namespace cc
