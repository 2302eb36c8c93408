// Which hosts' headers travel between which hosts in an exchange, and when. Pure.
//
// A few hosts tell each other directly: one step, H - 1 messages per host, one network latency. More hosts use the
// dissemination of Bruck et al. (1997): in step k, host h sends what it knows of the hosts h, h+1, ..., h+2^k-1 to
// host h-2^k, so that after ceil(log2 H) steps, with one message each way in each, every host knows all. Host numbers
// are modulo H.
#pragma once

#include <vector>

namespace cc {

// Where a message costs a few microseconds of the processor's time and a step a latency of some tens, the two are
// even at ten to twenty hosts; below, the direct way is also the one in which a missing host shows by itself.
constexpr int max_direct_hosts = 8;

struct HostRange {
  int first;
  int count;  // of hosts from `first` on, around
};

struct FromHost {
  int host;
  HostRange hosts;  // whose headers it sends
};

struct DisseminationStep {
  HostRange sends;             // hosts whose headers this one sends
  std::vector<int> to;         // to these hosts
  std::vector<FromHost> from;  // after which this one knows more
};

std::vector<DisseminationStep> plan_dissemination(int host, int hosts);
// In log2 H steps, however few hosts there are.
std::vector<DisseminationStep> plan_doubling(int host, int hosts);

}  // namespace cc
