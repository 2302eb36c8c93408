#include "negotiation/dissemination.h"

#include <algorithm>

namespace cc {

std::vector<DisseminationStep> plan_dissemination(int host, int hosts) {
  if (hosts <= max_direct_hosts) {
    DisseminationStep step{{host, 1}, {}, {}};
    for (int other = 0; other < hosts; ++other) {
      if (other == host) continue;
      step.to.push_back(other);
      step.from.push_back({other, {other, 1}});
    }
    return {step};
  }
  return plan_doubling(host, hosts);
}

std::vector<DisseminationStep> plan_doubling(int host, int hosts) {
  std::vector<DisseminationStep> steps;
  for (int distance = 1; distance < hosts; distance *= 2) {
    const int count = std::min(distance, hosts - distance);
    const int next = (host + distance) % hosts;
    steps.push_back({{host, count}, {(host - distance + hosts) % hosts}, {{next, {next, count}}}});
  }
  return steps;
}

}  // namespace cc
