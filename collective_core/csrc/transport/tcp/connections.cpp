#include "transport/tcp/connections.h"

#include <poll.h>

#include <atomic>
#include <exception>
#include <future>
#include <list>
#include <set>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/interruption.h"
#include "transport/tcp/handshake.h"

namespace cc {
namespace {

constexpr int poll_ms = 20;  // between looks at the deadline
// Unproven connections held at once, beside those that are expected; the oldest is dropped for a newer one.
constexpr size_t most_strangers = 256;
// Calls taken before those that were taken get a look: a flood of strangers must not push out one that is expected.
constexpr int most_at_once = 64;

struct Call {  // one expected connection, seen from this rank
  int peer;
  Purpose purpose;
  int channel;
  bool operator<(const Call& o) const {
    return std::tie(peer, purpose, channel) < std::tie(o.peer, o.purpose, o.channel);
  }
};

struct Expected {
  std::vector<Call> outgoing;
  std::set<Call> incoming;
};

// The higher rank calls the lower one; a data connection is called by its sender.
Expected plan_calls(const Topology& t, int sockets) {
  Expected calls;
  const auto pair_with = [&](int peer, Purpose purpose) {
    if (peer < t.rank) calls.outgoing.push_back({peer, purpose, 0});
    if (peer > t.rank) calls.incoming.insert({peer, purpose, 0});
  };
  for (const int peer : t.local_ranks()) pair_with(peer, Purpose::local);
  const int hosts = t.host_count();
  if (hosts < 2) return calls;
  if (t.is_leader()) {
    for (int host = 0; host < hosts; ++host) {
      if (host != t.host) pair_with(t.leader_of(host), Purpose::control);
    }
  }
  if (t.local_rank < t.channels()) {
    const int next = t.hosts[(t.host + 1) % hosts][t.local_rank];
    const int previous = t.hosts[(t.host + hosts - 1) % hosts][t.local_rank];
    for (int number = 0; number < sockets; ++number) {
      calls.outgoing.push_back({next, Purpose::data, number});
      calls.incoming.insert({previous, Purpose::data, number});
    }
  }
  return calls;
}

void keep(Connections* connections, const Call& call, bool called_by_me, Fd fd) {
  tune_peer_socket(fd.get());
  switch (call.purpose) {
    case Purpose::none:
      break;
    case Purpose::local:
      connections->local[call.peer] = std::move(fd);
      break;
    case Purpose::control:
      connections->control[call.peer] = std::move(fd);
      break;
    case Purpose::data: {
      std::vector<Fd>& those = called_by_me ? connections->to_next : connections->from_previous;
      const auto number = static_cast<size_t>(call.channel);
      if (those.size() <= number) those.resize(number + 1);
      those[number] = std::move(fd);
      break;
    }
  }
}

// Takes calls until all expected ones have proven themselves, `stop` is set, or the deadline passes.
class Acceptor {
 public:
  Acceptor(const Topology& topology, Listeners listeners, std::string secret, std::set<Call> expected)
      : topology_(topology),
        listeners_(std::move(listeners)),
        secret_(std::move(secret)),
        missing_(std::move(expected)),
        most_visitors_(missing_.size() + most_strangers) {}

  void run(const Deadline& deadline, const std::atomic<bool>& stop) {
    try {
      while (!missing_.empty() && !deadline.passed() && !stop) {
        wait();
        take_callers(listeners_.tcp, false);
        take_callers(listeners_.unix_socket, true);
        for (auto visitor = visitors_.begin(); visitor != visitors_.end();) {
          visitor = settled(*visitor) ? visitors_.erase(visitor) : std::next(visitor);
        }
      }
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  const std::set<Call>& missing() const { return missing_; }
  Connections& accepted() { return accepted_; }
  std::exception_ptr error() const { return error_; }

 private:
  void wait() {
    std::vector<pollfd> waiting;
    for (const Fd* listener : {&listeners_.tcp, &listeners_.unix_socket}) {
      if (*listener) waiting.push_back({listener->get(), POLLIN, 0});
    }
    for (const Visitor& visitor : visitors_) waiting.push_back({visitor.fd(), POLLIN, 0});
    poll(waiting.data(), waiting.size(), poll_ms);
  }

  void take_callers(const Fd& listener, bool is_local) {
    if (!listener) return;
    for (int taken = 0; taken < most_at_once; ++taken) {
      Fd fd = accept_now(listener.get());
      if (!fd) return;
      if (is_local && !same_user(fd.get())) continue;
      if (visitors_.size() >= most_visitors_) visitors_.pop_front();
      visitors_.emplace_back(std::move(fd), is_local);
    }
  }

  // True when the visitor needs no more attention. A stranger is dropped without a word; it is not our error.
  bool settled(Visitor& visitor) {
    switch (visitor.advance(secret_, topology_.rank)) {
      case Visitor::State::waiting:
        return visitor.expired();
      case Visitor::State::refused:
        return true;
      case Visitor::State::accepted:
        break;
    }
    const Call call{visitor.hello().from, visitor.hello().purpose, visitor.hello().channel};
    const bool right_door = visitor.is_local() == (call.purpose == Purpose::local);
    if (right_door && missing_.count(call) > 0 && visitor.welcome()) {
      missing_.erase(call);
      keep(&accepted_, call, false, visitor.take());
    }
    return true;
  }

  const Topology& topology_;
  Listeners listeners_;
  std::string secret_;
  std::set<Call> missing_;
  const size_t most_visitors_;
  std::list<Visitor> visitors_;
  Connections accepted_;
  std::exception_ptr error_;
};

// Until the peer has let this rank in: who is called by many strangers may hang up on it. One that listens no more
// after that is gone.
Fd enter(const Topology& topology, const Call& call, const std::string& secret, const Deadline& deadline) {
  const Peer& peer = topology.peers[call.peer];
  for (double patience = refused_patience;; patience = 0) {
    Fd fd = call.purpose == Purpose::local ? connect_unix(peer.socket_name, deadline, patience)
                                           : connect_tcp(peer.address, peer.port, deadline, patience);
    if (call.purpose == Purpose::local && !same_user(fd.get())) {
      throw Failure(Fault::peer_lost, "it runs under another user");
    }
    try {
      introduce(fd.get(), secret, topology.rank, call.peer, call.purpose, call.channel, deadline);
      return fd;
    } catch (const HungUp&) {
      if (deadline.passed()) throw;
    }
    poll(nullptr, 0, poll_ms);
  }
}

Fd call_peer(const Topology& topology, const Call& call, const std::string& secret, const Deadline& deadline) {
  const Peer& peer = topology.peers[call.peer];
  try {
    return enter(topology, call, secret, deadline);
  } catch (const Failure& failure) {
    const bool network = call.purpose != Purpose::local;
    throw Failure(
        failure.fault,
        "no connection to " + topology.describe(call.peer) +
            (network ? " at " + peer.address + " port " + std::to_string(peer.port) : "") + ": " + failure.what() +
            (network ? "; is a firewall between the hosts, or is this the wrong network (set COLLECTIVE_NETWORK)?"
                     : ""),
        {call.peer});
  }
}

}  // namespace

Listeners open_listeners(const std::string& address) {
  Listeners listeners;
  listeners.unix_socket = listen_unix(&listeners.socket_name);
  if (!address.empty()) listeners.tcp = listen_tcp(address, &listeners.port);
  return listeners;
}

Connections connect_all(const Topology& topology, Listeners listeners, const std::string& secret, double seconds,
                        int sockets) {
  const Deadline deadline(seconds);
  const Expected calls = plan_calls(topology, sockets);
  allow_descriptors(calls.outgoing.size() + calls.incoming.size());
  std::atomic<bool> stop{false};
  Acceptor acceptor(topology, std::move(listeners), secret, calls.incoming);
  std::promise<void> ended;
  std::thread listening([&] {
    acceptor.run(deadline, stop);
    ended.set_value();
  });

  Connections called;
  std::exception_ptr error;
  try {
    for (const Call& call : calls.outgoing) keep(&called, call, true, call_peer(topology, call, secret, deadline));
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
    for (const Call& call : acceptor.missing()) ranks.insert(call.peer);
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
  all.to_next = std::move(called.to_next);
  return all;
}

}  // namespace cc
