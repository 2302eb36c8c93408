// How the headers of several ranks travel between hosts. Pure.
//
//   block  run, run, ...
//   run    Run, Header, payload of Header::inline_bytes: what this and the following ranks, `ranks` of them, ask for
//
// In step, all ranks ask for the same, and the block of any number of them is one run of 212 bytes. Only what differs
// from rank to rank takes its room: small tensors, splits, rows of an allgather. Where a tensor lies in a rank's arena
// means something on its own host only; what others need to know is whether it does, and a place travels as 0 or 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/operation.h"

namespace cc {

struct Run {
  uint32_t ranks;
};

// `slots`: each rank's header with its payload behind it.
void write_block(const std::vector<const Header*>& slots, std::vector<char>* block);
// Fills `slots`, with room for `most_payload` bytes behind each header. False when these bytes cannot have come from
// so many ranks in exchange `sequence` of a job of `size`; then the slots hold nothing of use.
bool read_block(const std::vector<char>& block, uint32_t sequence, int size, size_t most_payload,
                const std::vector<Header*>& slots);
// Bytes that the block of so many ranks can have at most.
size_t longest_block(size_t ranks, size_t most_payload);

}  // namespace cc
