// One rank's part in finding the operation that all run next: from the headers of an exchange, and from what this rank
// has been asked for, to what it does now. Pure: the exchange, the queue and the clock are the engine's
// (negotiate.cpp), or those of the explorer of all interleavings (tests/explorer.cpp).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/errors.h"
#include "base/operation.h"
#include "base/topology.h"

namespace cc {

inline bool joins(const Header& header) {
  return header.kind == Kind::join;
}

// -------------------------------------------- what all ranks come to, each for itself, from the same headers

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

// ------------------------------------------------------------------------------- what one of them does then

// What this rank has been asked for and has not run.
struct Submission {
  const Header* header;
  bool blocking;  // a caller waits for it
};

enum class Step {
  run,            // what all propose
  run_as_joined,  // what the others propose, and then propose again
  stay_joined,    // in what the others do not agree on, and propose again
  reorder,        // propose again, because the names differ
  fail            // an error on every rank
};

struct Negotiation {
  // What is proposed is told from other submissions by the address of its header.
  explicit Negotiation(const Header* came_with) : mine(came_with) {}

  // Whether this rank may still submit what the others want. `only_one`: a caller waits for what is proposed, there is
  // nothing else in the queue, and no other thread that could submit something.
  Blocked says(bool only_one) const { return blocked == Blocked::no && only_one ? Blocked::waits : blocked; }
  // After the exchange in which this rank has proposed `mine`.
  Step after(const std::vector<const Header*>& headers, int rank);
  // Then, unless it runs or fails: sets `mine` and `blocked`, or returns false where what the others want is still to
  // be submitted. `submitted`: first what the negotiation has begun with. `callers_wait`: whether nobody will submit
  // anything before what a caller waits for is done; asked only where it matters.
  bool propose(const std::vector<Submission>& submitted, bool closing, const std::function<bool()>& callers_wait);

  const Header* mine;
  Blocked blocked = Blocked::no;
  std::vector<const Header*> tried = {};  // while it is this rank that decides: what it has proposed so far
  Agreement agreement = {};               // of the latest exchange
  uint64_t wanted = 0;                    // the name that goes first
  bool decides = false;                   // because this rank is blocked
};

}  // namespace cc
