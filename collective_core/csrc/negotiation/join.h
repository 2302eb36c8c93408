// A rank that has joined has no more data, but takes part in what the others still do: with the identity of the
// reduction, without rows, and it drops what it receives.
#pragma once

#include <vector>

#include "base/operation.h"

namespace cc {

// Which ranks have joined, from the headers of every exchange. All ranks see the same headers, so they agree.
class JoinedRanks {
 public:
  explicit JoinedRanks(int size) : joined_(static_cast<size_t>(size), false) {}
  // Returns how many ranks have not joined.
  int update(const std::vector<const Header*>& headers);
  // The rank that joined last; of several in one exchange, the highest. To be asked when all have joined; forgets them.
  int take_last();

 private:
  std::vector<bool> joined_;
  int last_ = 0;
};

// Whether a factor for the inputs would also hit the identity with which a rank that has joined takes part: then each
// rank applies it to its own input before the transfer, which is one of accumulators without factors.
bool scales_before_transfer(const Header& header, bool some_joined, uint64_t inline_bytes);
Header without_factors(const Header& header);

// An operation that takes part in `wanted`, which the ranks that have not joined run, and its memory.
struct NeutralOperation {
  NeutralOperation(const Header& wanted, int size);
  Operation operation;

 private:
  std::vector<char> input_, output_;
};

}  // namespace cc
