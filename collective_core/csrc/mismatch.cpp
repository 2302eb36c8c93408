#include "mismatch.h"

#include <cstdio>
#include <cstring>
#include <utility>

namespace cc {
namespace {

bool same_request(const Header& a, const Header& b) {
  if (a.name_hash != b.name_hash || a.kind != b.kind || a.dtype != b.dtype || a.reduce != b.reduce ||
      a.root != b.root || a.ndim != b.ndim || a.prescale != b.prescale || a.postscale != b.postscale) {
    return false;
  }
  // Ranks may gather different numbers of rows, but rows of one shape.
  const bool gather = a.kind == Kind::allgather;
  if (!gather && a.count != b.count) return false;
  const int first = gather ? 1 : 0;
  return std::memcmp(a.dims + first, b.dims + first, sizeof(int64_t) * static_cast<size_t>(max_dims - first)) == 0;
}

std::string describe(const Header& h) {
  std::string text = name_of(h.kind);
  if (h.name[0]) text += std::string(" '") + h.name + "'";
  if (h.kind == Kind::barrier) return text;
  text += std::string(" of ") + name_of(h.dtype) + h.shape_text();
  if (h.kind == Kind::broadcast) text += " from root " + std::to_string(h.root);
  if (h.kind == Kind::allreduce) {
    text += std::string(" with ") + name_of(h.reduce);
    if (h.prescale != 1.0 || h.postscale != 1.0) {
      char factors[80];
      std::snprintf(factors, sizeof factors, " prescale %.9g postscale %.9g", h.prescale, h.postscale);
      text += factors;
    }
  }
  return text;
}

}  // namespace

Agreement compare(const std::vector<const Header*>& headers) {
  int first = -1;
  bool agreed = true, names_differ = false, stuck_apart = false;
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    const Header& header = *headers[rank];
    agreed = agreed && same_request(*headers[0], header);
    names_differ = names_differ || header.name_hash != headers[0]->name_hash;
    if (!header.stuck) continue;
    if (first < 0) first = static_cast<int>(rank);
    stuck_apart = stuck_apart || header.name_hash != headers[first]->name_hash;
  }
  first = first < 0 ? 0 : first;
  if (agreed) return {Verdict::agreed, first};
  return {names_differ && !stuck_apart ? Verdict::reorder : Verdict::disagreed, first};
}

std::string explain_disagreement(const std::vector<const Header*>& headers, const Topology& topology) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    const std::string request = describe(*headers[rank]);
    bool known = false;
    for (auto& group : groups) {
      if (group.first == request) {
        group.second.push_back(static_cast<int>(rank));
        known = true;
      }
    }
    if (!known) groups.push_back({request, {static_cast<int>(rank)}});
  }
  std::string text = "the ranks ask for different things: ";
  for (size_t i = 0; i < groups.size(); ++i) {
    if (i) text += "; ";
    text += topology.describe(groups[i].second) + ": " + groups[i].first;
  }
  if (groups.size() == 1) text += " (the requests differ in a part that is not shown, such as a long name)";
  return text;
}

std::vector<int> dissenters(const std::vector<const Header*>& headers) {
  std::vector<int> ranks;
  for (size_t rank = 1; rank < headers.size(); ++rank) {
    if (!same_request(*headers[0], *headers[rank])) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

}  // namespace cc
