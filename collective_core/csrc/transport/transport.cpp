#include "transport/transport.h"

#include <utility>

namespace cc {

ConnectionPlan plan_connections(const Topology& t, int sockets) {
  ConnectionPlan plan;
  const auto pair_with = [&](int peer, Purpose purpose) {
    if (peer < t.rank) plan.outgoing.push_back({peer, purpose, 0});
    if (peer > t.rank) plan.incoming.insert({peer, purpose, 0});
  };
  for (const int peer : t.local_ranks()) pair_with(peer, Purpose::local);
  const int hosts = t.host_count();
  if (hosts < 2) return plan;
  if (t.is_leader()) {
    for (int host = 0; host < hosts; ++host) {
      if (host != t.host) pair_with(t.leader_of(host), Purpose::control);
    }
  }
  if (t.local_rank < t.channels()) {
    const int next = t.hosts[(t.host + 1) % hosts][t.local_rank];
    const int previous = t.hosts[(t.host + hosts - 1) % hosts][t.local_rank];
    for (int number = 0; number < sockets; ++number) {
      plan.outgoing.push_back({next, Purpose::data, number});
      plan.incoming.insert({previous, Purpose::data, number});
    }
  }
  return plan;
}

void Connections::add(const PlannedConnection& planned, bool outgoing, std::unique_ptr<Connection> connection) {
  if (planned.purpose == Purpose::control) {
    control[planned.peer] = std::move(connection);
    return;
  }
  std::vector<std::unique_ptr<Connection>>& data = outgoing ? to_next : from_previous;
  const auto number = static_cast<size_t>(planned.channel);
  if (data.size() <= number) data.resize(number + 1);
  data[number] = std::move(connection);
}

}  // namespace cc
