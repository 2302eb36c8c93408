// Who runs where: ranks grouped into hosts, in the order in which the engine sums. Pure: no sockets, no clock.
//
// Hosts are ordered by their lowest rank, ranks inside a host by rank. `order` lists all ranks host after host; it is
// the order of summation. Launchers that fill one host before the next (mpirun's default, "by slot") give order =
// 0,1,2,... Under a cyclic placement ("by node") the order is still one fixed order for every element, only not the
// rank order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cc {

struct Peer {
  int rank = 0;         // in the process set
  int global_rank = 0;  // in the job: the one that users are told
  int64_t pid = 0;
  std::string host_id;    // equal for two ranks exactly when they can share memory
  std::string host_name;  // for messages
  std::string address;    // numeric IPv4 or IPv6, empty when all ranks are on one host
  int port = 0;
  std::string socket_name;  // of the abstract unix socket, empty when the rank is alone on its host
  std::vector<std::string>
      rails;  // further addresses, which data connections take in turn with that one; as many on all
};

struct Topology {
  int rank = 0;
  int size = 1;
  std::vector<Peer> peers;              // by rank
  std::vector<std::vector<int>> hosts;  // ranks of each host
  std::vector<int> order;               // of summation
  int host = 0;                         // index of this rank's host
  int local_rank = 0;

  int local_size() const { return static_cast<int>(hosts[host].size()); }
  int host_count() const { return static_cast<int>(hosts.size()); }
  const std::vector<int>& local_ranks() const { return hosts[host]; }
  int leader_of(int host_index) const { return hosts[host_index][0]; }
  bool is_leader() const { return local_rank == 0; }
  int host_of(int other_rank) const;
  // Ranks per host that have a partner on every other host; each such rank carries a slice of the data over the
  // network.
  int channels() const;
  // Whether all hosts have equally many ranks, so that each has such a partner.
  bool is_even() const { return size == host_count() * channels(); }
  // "rank 3 (host node-b, pid 4711)", with the rank in the job
  std::string describe(int other_rank) const;
  std::string describe(const std::vector<int>& ranks) const;
};

// Throws Failure(invalid) when the table does not describe ranks 0..size-1.
Topology make_topology(int rank, std::vector<Peer> peers);

}  // namespace cc
