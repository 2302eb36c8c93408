// Which hosts' headers travel between which hosts in an exchange, and when. Pure.
//
// A few hosts tell each other directly: one round, H - 1 messages per host, one network latency. More hosts use the
// dissemination of Bruck et al. (1997): in round k, host h sends what it knows of the hosts h, h+1, ..., h+2^k-1 to
// host h-2^k, so that after ceil(log2 H) rounds, with one message each way in each, every host knows all. Host numbers
// are modulo H.
#pragma once

#include <vector>

namespace cc {

// Where a message costs a few microseconds of the processor's time and a round a latency of some tens, the two are
// even at ten to twenty hosts; below, the direct way is also the one in which a missing host shows by itself.
constexpr int most_direct_hosts = 8;

struct HostRange {
  int first;
  int count;  // of hosts from `first` on, around
};

struct FromHost {
  int host;
  HostRange hosts;  // whose headers it sends
};

struct Round {
  HostRange told;              // hosts whose headers this one sends
  std::vector<int> to;         // to these hosts
  std::vector<FromHost> from;  // after which this one knows more
};

std::vector<Round> plan_rounds(int host, int hosts);

}  // namespace cc
