#include "transport/seam.h"

#include <utility>

namespace cc {
namespace {

// Of one rank to all others. A host receives from all of them at once, and the more there are the less their exchange
// saves: of many hosts nearly as many bytes pass each link as on the ring.
constexpr int max_mesh_connections = 64;

}  // namespace

ConnectionPlan plan_connections(const Topology& t, int sockets) {
  ConnectionPlan plan;
  const auto pair_with = [&](int peer, Purpose purpose) {
    if (peer < t.rank) plan.outgoing.push_back({peer, purpose, 0});
    if (peer > t.rank) plan.incoming.insert({peer, purpose, 0});
  };
  for (const int peer : t.local_ranks()) pair_with(peer, Purpose::local);
  const int hosts = t.host_count();
  if (t.is_leader()) {
    for (int host = 0; host < hosts; ++host) {
      if (host != t.host) pair_with(t.leader_of(host), Purpose::control);
    }
  }
  const bool is_mesh = t.size == hosts && (hosts - 1) * sockets <= max_mesh_connections;
  // Each begins with the next host, so that they do not all call the first one at the same time.
  for (int k = 1; k < hosts && t.local_rank < t.channels(); ++k) {
    const int host = (t.host + k) % hosts;
    const int peer = t.hosts[host][t.local_rank];
    const bool is_next = k == 1, is_previous = t.host == (host + 1) % hosts;
    for (int number = 0; number < sockets; ++number) {
      if (is_next || is_mesh) plan.outgoing.push_back({peer, Purpose::data, number});
      if (is_previous || is_mesh) plan.incoming.insert({peer, Purpose::data, number});
    }
  }
  return plan;
}

void Connections::add(const PlannedConnection& planned, bool outgoing, std::unique_ptr<Connection> connection) {
  if (planned.purpose == Purpose::control) {
    control[planned.peer] = std::move(connection);
    return;
  }
  std::vector<std::unique_ptr<Connection>>& all = (outgoing ? to : from)[planned.peer];
  const auto number = static_cast<size_t>(planned.channel);
  if (all.size() <= number) all.resize(number + 1);
  all[number] = std::move(connection);
}

}  // namespace cc
