// Do all ranks ask for the same thing? Pure: decides from the headers alone, so every rank comes to the same verdict.
#pragma once

#include <string>
#include <vector>

#include "base/errors.h"
#include "base/operation.h"
#include "base/topology.h"

namespace cc {

enum class Verdict {
  agreed,    // run it
  reorder,   // the names differ, but perhaps only in the order of submission: the operation of rank `first` goes first
  disagreed  // an error on every rank
};

struct Agreement {
  Verdict verdict;
  int first;
  bool one_name;    // whether the operations have the same name on all ranks that have not joined
  bool all_joined;  // or ask to
};

// Ranks that have joined agree with everything, except with what needs one of them: a broadcast from it. The first rank
// that is blocked decides what goes first, otherwise rank 0: what all can agree on must be among what it has submitted.
// Where the others are without each of its operations, they never agree; nor do joins under different names, which
// nothing else could go before.
Agreement compare(const std::vector<const Header*>& headers);
// Who asked for what, for the error: ranks with the same request are listed together.
std::string explain_disagreement(const std::vector<const Header*>& headers, const Topology& topology);
// For rank `rank`, after the verdict. To blame are the ranks that object or, if none does, those whose request differs
// from that of the first rank that has not joined.
Failure disagreement(const std::vector<const Header*>& headers, const Topology& topology, int rank, bool one_name);

}  // namespace cc
