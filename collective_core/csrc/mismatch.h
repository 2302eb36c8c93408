// Do all ranks ask for the same thing? Pure: decides from the headers alone, so every rank comes to the same verdict.
#pragma once

#include <string>
#include <vector>

#include "operation.h"
#include "topology.h"

namespace cc {

enum class Verdict {
  agreed,    // run it
  reorder,   // the names differ, but perhaps only in the order of submission: the operation of rank `first` goes first
  disagreed  // an error on every rank
};

struct Agreement {
  Verdict verdict;
  int first;
};

// The first rank whose caller is stuck in its operation decides what goes first, otherwise rank 0. Two ranks that are
// stuck in operations of different names can never agree.
Agreement compare(const std::vector<const Header*>& headers);
// Who asked for what, for the error: ranks with the same request are listed together.
std::string explain_disagreement(const std::vector<const Header*>& headers, const Topology& topology);
// The ranks whose request differs from rank 0's.
std::vector<int> dissenters(const std::vector<const Header*>& headers);

}  // namespace cc
