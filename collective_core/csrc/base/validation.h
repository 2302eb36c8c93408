// What another host's leader sends is looked at before anything acts on it: a rank with broken memory, or with another
// build of the engine, must end the job with a sentence and not with a crash. Pure.
#pragma once

#include <vector>

#include "base/errors.h"
#include "base/operation.h"

namespace cc {

// Whether a header from the network describes something that could have been asked for in a job of `size` ranks.
bool is_valid_header(const Header& header, int size);
// Whether the splits of an alltoall, one for every rank, say no more and no less than its header. `row_bytes`: of the
// agreed shape.
bool are_valid_splits(const std::vector<int64_t>& splits, const Header& header, uint64_t row_bytes);
// The fault with this number, which another rank announced as the end of the job; `internal` if there is no such one.
Fault fault_of(int number);

}  // namespace cc
