// Allreduce among the P ranks of one host of tensors that lie in the arena: nothing is copied.
//
// The exchange of headers before it tells that all inputs are ready, and where. Then
//   1. rank i reduces slice i (1/P) of all P inputs, in rank order, block by block, and stores each block into slice i
//      of all P outputs;
//   2. barrier.
// A block is read from all inputs before it is stored anywhere, and slices do not overlap, so outputs may be the
// inputs.
//
// Bytes per rank for a tensor of N bytes: read N, write N, which is the least that is possible; all ranks together move
// 2 P N. Where that is more than the caches hold, the stores go past them: a store through the cache would first read
// the line.
//
// Order: element by element x0 + x1 + ... + x(P-1), whatever the slice or block.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives.h"

namespace cc {
namespace {

constexpr size_t block_bytes = 4096;  // in a first-level cache together with its inputs

// Inputs and outputs that are larger than this do not stay in cache from one operation to the next.
size_t cached_bytes() {
  static const long third = sysconf(_SC_LEVEL3_CACHE_SIZE), second = sysconf(_SC_LEVEL2_CACHE_SIZE);
  constexpr long unknown = 4 << 20;
  return static_cast<size_t>(std::max({third, second, 0L}) > 0 ? std::max(third, second) : unknown) / 2;
}

}  // namespace

void allreduce_arena(Group& group, const Operation& operation, const std::vector<const Header*>& headers,
                     Deadline& deadline) {
  const Header& header = operation.header;
  const Topology& topology = group.topology();
  const Reduction reduction = reduction_of(header, operation.contributors);
  const size_t element = size_of(header.dtype);
  const int ranks = topology.local_size();
  const Slice slice = slice_of(header.count, topology.local_rank, ranks, element);
  std::vector<const void*> sources(static_cast<size_t>(ranks));
  std::vector<char*> inputs, outputs;
  bool in_place = true;
  for (const int r : topology.local_ranks()) {
    const int global_rank = topology.peers[r].global_rank;
    inputs.push_back(group.arena()->at(global_rank, headers[r]->input_place) + slice.begin * element);
    outputs.push_back(group.arena()->at(global_rank, headers[r]->output_place) + slice.begin * element);
    in_place = in_place && inputs.back() == outputs.back();
  }
  const size_t touched = header.bytes() * static_cast<size_t>(ranks) * (in_place ? 1 : 2);
  const bool streams = touched > cached_bytes();

  alignas(cache_line) char block[block_bytes];
  const size_t step = block_bytes / element;
  for (size_t at = 0; at < slice.length; at += step) {
    const size_t length = std::min(step, slice.length - at), bytes = length * element;
    for (size_t r = 0; r < inputs.size(); ++r) sources[r] = inputs[r] + at * element;
    kernels().reduce(reduction, block, sources.data(), ranks, length);
    for (char* output : outputs) {
      if (streams) {
        kernels().stream(output + at * element, block, bytes);
      } else {
        std::memcpy(output + at * element, block, bytes);
      }
    }
  }
  if (streams) kernels().stream_done();
  group.step_barrier(deadline);
}

}  // namespace cc
