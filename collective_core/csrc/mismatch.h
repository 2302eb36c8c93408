// Do all ranks ask for the same thing? Pure: decides from the headers alone, so every rank comes to the same verdict.
#pragma once

#include <string>
#include <vector>

#include "operation.h"
#include "topology.h"

namespace cc {

enum class Verdict {
  agreed,    // run it
  reorder,   // the names differ, but only in order of submission perhaps: rank 0's operation goes first
  disagreed  // an error on every rank
};

Verdict compare(const std::vector<const Header*>& headers);
// Who asked for what, for the error: ranks with the same request are listed together.
std::string explain_disagreement(const std::vector<const Header*>& headers, const Topology& topology);
// The ranks whose request differs from rank 0's.
std::vector<int> dissenters(const std::vector<const Header*>& headers);

}  // namespace cc
