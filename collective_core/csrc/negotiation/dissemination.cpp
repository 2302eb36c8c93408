#include "negotiation/dissemination.h"

#include <algorithm>

namespace cc {

std::vector<Round> plan_rounds(int host, int hosts) {
  std::vector<Round> rounds;
  if (hosts <= most_direct_hosts) {
    Round round{{host, 1}, {}, {}};
    for (int other = 0; other < hosts; ++other) {
      if (other == host) continue;
      round.to.push_back(other);
      round.from.push_back({other, {other, 1}});
    }
    rounds.push_back(round);
    return rounds;
  }
  for (int distance = 1; distance < hosts; distance *= 2) {
    const int count = std::min(distance, hosts - distance);
    const int next = (host + distance) % hosts;
    rounds.push_back({{host, count}, {(host - distance + hosts) % hosts}, {{next, {next, count}}}});
  }
  return rounds;
}

}  // namespace cc
