// How the headers of several ranks travel between hosts. Pure.
//
//   encoded headers  run, run, ...
//   run              HeaderRun, Header, payload of Header::inline_bytes: what this and the following ranks, `ranks` of
//                    them, ask for
//
// Where all ranks ask for the same, any number of their headers is encoded as one run of 212 bytes. Only what differs
// from rank to rank takes its room: small tensors, splits, rows of an allgather. Where a tensor lies in a rank's arena
// means something on its own host only; what others need to know is whether it does, and a location travels as 0 or 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/operation.h"

namespace cc {

struct HeaderRun {
  uint32_t ranks;
};

// `slots`: each rank's header with its payload behind it; those that follow each other may be one.
void encode_headers(const std::vector<const Header*>& slots, std::vector<char>* encoded);
// Fills the slot of the first rank of each run, with room for `max_payload` bytes behind the header; `leads`: for each
// rank the index of that one. False when these bytes cannot have come from so many ranks in exchange `sequence` of a
// job of `size`; then they hold nothing of use.
bool decode_headers(const std::vector<char>& encoded, uint32_t sequence, int size, size_t max_payload,
                    const std::vector<Header*>& slots, std::vector<size_t>* leads);
// Bytes that the encoded headers of so many ranks can have at most.
size_t max_encoded_bytes(size_t ranks, size_t max_payload);

}  // namespace cc
