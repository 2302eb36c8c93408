#include "base/topology.h"

#include <algorithm>
#include <utility>

#include "base/errors.h"

namespace cc {

int Topology::host_of(int other_rank) const {
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (std::find(hosts[i].begin(), hosts[i].end(), other_rank) != hosts[i].end()) return static_cast<int>(i);
  }
  return -1;
}

int Topology::channels() const {
  size_t fewest = hosts[0].size();
  for (const auto& ranks : hosts) fewest = std::min(fewest, ranks.size());
  return static_cast<int>(fewest);
}

std::string Topology::describe(int other_rank) const {
  const Peer& peer = peers[other_rank];
  return "rank " + std::to_string(peer.global_rank) + " (host " + peer.host_name + ", pid " + std::to_string(peer.pid) +
         ")";
}

std::string Topology::describe(const std::vector<int>& ranks) const {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i) text += i + 1 == ranks.size() ? " and " : ", ";
    text += describe(ranks[i]);
  }
  return text;
}

Topology make_topology(int rank, std::vector<Peer> peers) {
  Topology topology;
  topology.rank = rank;
  topology.size = static_cast<int>(peers.size());
  if (rank < 0 || rank >= topology.size) throw Failure(Fault::invalid, "rank outside the table of peers");
  std::vector<std::string> ids;
  for (int i = 0; i < topology.size; ++i) {
    if (peers[i].rank != i) throw Failure(Fault::invalid, "the table of peers must list ranks 0, 1, 2, ... in order");
    auto found = std::find(ids.begin(), ids.end(), peers[i].host_id);
    const size_t index = static_cast<size_t>(found - ids.begin());
    if (found == ids.end()) {
      ids.push_back(peers[i].host_id);
      topology.hosts.emplace_back();
    }
    if (i == rank) {
      topology.host = static_cast<int>(index);
      topology.local_rank = static_cast<int>(topology.hosts[index].size());
    }
    topology.hosts[index].push_back(i);
  }
  for (const auto& ranks : topology.hosts) topology.order.insert(topology.order.end(), ranks.begin(), ranks.end());
  topology.peers = std::move(peers);
  return topology;
}

}  // namespace cc
