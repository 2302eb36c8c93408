#include "negotiation/negotiation.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

namespace cc {
namespace {

bool same_request(const Header& a, const Header& b) {
  if (a.unsupported || b.unsupported) return false;
  if (a.device != b.device || a.name_hash != b.name_hash || a.kind != b.kind || a.dtype != b.dtype ||
      a.reduce != b.reduce || a.root != b.root || a.ndim != b.ndim || a.shape_hash != b.shape_hash ||
      a.prescale != b.prescale || a.postscale != b.postscale) {
    return false;
  }
  // Ranks may gather or send different numbers of rows, but rows of one shape.
  const bool any_rows = a.kind == Kind::allgather || a.kind == Kind::alltoall;
  if (!any_rows && a.count != b.count) return false;
  const int first = any_rows ? 1 : 0;
  return std::memcmp(a.dims + first, b.dims + first, sizeof(int64_t) * static_cast<size_t>(max_dims - first)) == 0;
}

// Its type may be a stand-in for one that cannot be sent.
std::string unsupported_reason_of(const Header& h) {
  return {reinterpret_cast<const char*>(&h + 1), h.inline_bytes};
}

std::string describe(const Header& h, const Topology& topology) {
  std::string text = name_of(h.kind);
  if (h.name[0]) text += std::string(" '") + h.name + "'";
  if (!has_tensor(h.kind)) return text;
  if (h.unsupported) return text + ": " + unsupported_reason_of(h);
  text += std::string(" of ") + name_of(h.dtype) + h.shape_text() + (h.device == Device::host ? "" : " on a GPU");
  if (h.kind == Kind::broadcast) text += " from root " + std::to_string(topology.peers[h.root].global_rank);
  if (is_reduction(h.kind)) {
    text += std::string(" with ") + name_of(h.reduce);
    if (h.prescale != 1.0 || h.postscale != 1.0) {
      char factors[80];
      std::snprintf(factors, sizeof factors, " prescale %.9g postscale %.9g", h.prescale, h.postscale);
      text += factors;
    }
  }
  return text;
}

// The first rank that has not joined, whose request the others are compared with; 0 when all have.
size_t first_active(const std::vector<const Header*>& headers) {
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    if (!joins(*headers[rank])) return rank;
  }
  return 0;
}

// Whether the rank has joined, and others have not.
bool stands_in(const Header& header, const Header& active) {
  return joins(header) && !joins(active);
}

bool any_joined(const std::vector<const Header*>& headers) {
  return std::any_of(headers.begin(), headers.end(), [](const Header* h) { return joins(*h); });
}

// What a rank that has joined cannot stand in for: the root's data; and what shall not be done without it.
bool needs_joined(const Header& header, const std::vector<const Header*>& headers) {
  if (header.whole && any_joined(headers)) return true;
  return header.kind == Kind::broadcast && !header.unsupported && joins(*headers[header.root]);
}

std::vector<int> dissenters(const std::vector<const Header*>& headers) {
  std::vector<int> ranks;
  const bool any_unsupported =
      std::any_of(headers.begin(), headers.end(), [](const Header* h) { return h->unsupported; });
  const Header& reference = *headers[first_active(headers)];
  const auto add = [&](const auto& is_to_blame) {
    for (size_t rank = 0; rank < headers.size(); ++rank) {
      if (is_to_blame(*headers[rank])) ranks.push_back(static_cast<int>(rank));
    }
  };
  add([&](const Header& header) {
    if (any_unsupported) return header.unsupported != 0;
    return &header != &reference && !stands_in(header, reference) && !same_request(reference, header);
  });
  if (needs_joined(reference, headers)) add(joins);
  return ranks;
}

}  // namespace

Agreement compare(const std::vector<const Header*>& headers) {
  int first = -1;
  const size_t reference = first_active(headers);
  bool agreed = !needs_joined(*headers[reference], headers), names_differ = false;
  for (size_t rank = reference; rank < headers.size(); ++rank) {
    const Header& header = *headers[rank];
    const bool was_compared = rank > reference && headers[rank - 1] == &header;
    if (was_compared || stands_in(header, *headers[reference])) continue;
    agreed = agreed && same_request(*headers[reference], header);
    names_differ = names_differ || header.name_hash != headers[reference]->name_hash;
    if (first < 0 && header.blocked != Blocked::no) first = static_cast<int>(rank);
  }
  first = first < 0 ? static_cast<int>(reference) : first;
  const bool all_joined = joins(*headers[reference]);
  if (agreed) return {Verdict::agreed, first, true, all_joined};
  const bool in_vain = all_joined || headers[first]->blocked == Blocked::tried;
  return {names_differ && !in_vain ? Verdict::reorder : Verdict::disagreed, first, !names_differ, all_joined};
}

std::string explain_disagreement(const std::vector<const Header*>& headers, const Topology& topology) {
  std::vector<std::pair<std::string, std::vector<int>>> groups;
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    const std::string request = describe(*headers[rank], topology);
    const auto is_same = [&](const auto& group) { return group.first == request; };
    auto group = std::find_if(groups.begin(), groups.end(), is_same);
    if (group == groups.end()) group = groups.insert(group, {request, {}});
    group->second.push_back(static_cast<int>(rank));
  }
  if (groups.size() == 1 && headers[0]->unsupported) return unsupported_reason_of(*headers[0]);  // all want the same
  std::string text = "the ranks ask for different things: ";
  for (size_t i = 0; i < groups.size(); ++i) {
    if (i) text += "; ";
    text += topology.describe(groups[i].second) + ": " + groups[i].first;
  }
  if (headers[first_active(headers)]->whole && any_joined(headers)) {
    text += " (with COLLECTIVE_SEMANTICS=horovod, allreduce and barrier alone go on while a rank has joined)";
  }
  if (groups.size() == 1) {
    const auto other = [&](const Header* header) { return header->shape_hash != headers[0]->shape_hash; };
    const bool shapes = std::any_of(headers.begin(), headers.end(), other);
    text += shapes
                ? " (the shapes differ in a part that is not shown: of many dimensions, of what is fused, or complex)"
                : " (the requests differ in a part that is not shown, such as a long name)";
  }
  return text;
}

Failure disagreement(const std::vector<const Header*>& headers, const Topology& topology, int rank, bool one_name) {
  Failure failure(headers[rank]->unsupported ? Fault::invalid : Fault::mismatch,
                  explain_disagreement(headers, topology), dissenters(headers));
  failure.one_name = one_name;
  return failure;
}

Step Negotiation::after(const std::vector<const Header*>& headers, int rank) {
  agreement = compare(headers);
  const bool goes_on_after_it = joins(*headers[rank]) && !agreement.all_joined;
  if (agreement.verdict == Verdict::agreed && !goes_on_after_it) return Step::run;
  const bool reorders = agreement.verdict == Verdict::reorder;
  decides = reorders && agreement.first == rank && headers[rank]->blocked != Blocked::no;
  wanted = headers[agreement.first]->name_hash;
  if (!decides) tried.clear();
  if (reorders) return Step::reorder;
  if (!goes_on_after_it) return Step::fail;
  return agreement.verdict == Verdict::agreed ? Step::run_as_joined : Step::stay_joined;
}

bool Negotiation::propose(const std::vector<Submission>& submitted, bool closing,
                          const std::function<bool()>& callers_wait) {
  const auto find = [&](const auto& is_it) -> const Header* {
    const auto found = std::find_if(submitted.begin(), submitted.end(), is_it);
    return found == submitted.end() ? nullptr : found->header;
  };
  const auto set = [&](const Header* next, Blocked says_so) {
    mine = next;
    blocked = says_so;
    return true;
  };
  const auto is_tried = [&](const Header* one) { return std::find(tried.begin(), tried.end(), one) != tried.end(); };
  const auto is_wanted = [&](const Header* one) { return !joins(*one) && one->name_hash == wanted; };
  const Header* untried = find([&](const Submission& one) { return !joins(*one.header) && !is_tried(one.header); });
  const Header* awaited = find([](const Submission& one) { return one.blocking; });
  if (agreement.verdict != Verdict::reorder) return set(untried ? untried : submitted.front().header, Blocked::no);
  if (decides) {
    const bool was_answered = is_tried(mine);  // only after the first time do the others know that it goes first
    if (!was_answered) tried.push_back(mine);
    if (!was_answered) return set(mine, Blocked::waits);
    if (untried) return set(untried, Blocked::waits);
    return set(awaited ? awaited : mine, Blocked::tried);
  }
  if (is_wanted(mine)) return true;
  if (const Header* found = find([&](const Submission& one) { return is_wanted(one.header); }))
    return set(found, Blocked::no);
  if (const Header* join = find([](const Submission& one) { return joins(*one.header); }))
    return set(join, Blocked::no);  // this rank submits nothing more, and the others do without it
  // Nobody will submit it before what a caller waits for is done. If none of what is there is to be had from all ranks
  // either, every rank reports the disagreement.
  if (awaited && callers_wait()) return set(awaited, Blocked::waits);
  return closing && set(mine, Blocked::waits);
}

}  // namespace cc
