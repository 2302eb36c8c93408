#include "negotiation/negotiation.h"

#include <algorithm>

namespace cc {

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
