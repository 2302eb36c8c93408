// Allreduce among the P ranks of one host of tensors that lie in the arena: nothing is copied.
//
// The exchange of headers before it tells that all inputs are ready, and where. Then
//   1. rank i reduces slice i (1/P) of all P inputs, in rank order, and stores it into slice i of all P outputs:
//      element by element where that can be done in registers, otherwise block by block;
//   2. barrier.
// What is stored has been read from all inputs before, and slices do not overlap, so outputs may be the inputs.
//
// Bytes per rank for a tensor of N bytes: read N, write N, which is the least that is possible; all ranks together move
// 2 P N. Where outputs are not the inputs and all that is more than the caches hold, the stores go past them: a store
// through the cache would first read the line. Lines of an input have just been read: there it would only be slower.
//
// Of D NUMA nodes with P/D bound ranks each, (D-1)/D of what a rank reads and writes is another node's: together 2 N P
// (D-1)/D bytes (docs/architecture.md, Decisions: engine), where ranks have written to their outputs before. Of others
// a page belongs to the node of the rank that is the first to store a slice there.
//
// Order: element by element x0 + x1 + ... + x(P-1), whatever the slice or block.
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithms/collectives.h"

namespace cc {
namespace {

constexpr size_t strip_bytes = 2048;  // in a first-level cache together with its inputs

// Inputs and outputs that are larger than this do not stay in cache from one operation to the next.
size_t cached_bytes() {
  static const long third = sysconf(_SC_LEVEL3_CACHE_SIZE), second = sysconf(_SC_LEVEL2_CACHE_SIZE);
  constexpr long unknown = 4 << 20;
  return static_cast<size_t>(std::max({third, second, 0L}) > 0 ? std::max(third, second) : unknown) / 2;
}

void reduce_in_blocks(const Reduction& reduction, const std::vector<void*>& outputs,
                      const std::vector<const void*>& inputs, size_t elements, bool streams) {
  alignas(cache_line) char block[strip_bytes];
  const size_t element = size_of(reduction.dtype), step = strip_bytes / element;
  std::vector<const void*> sources(inputs.size());
  for (size_t at = 0; at < elements; at += step) {
    const size_t length = std::min(step, elements - at), bytes = length * element;
    for (size_t r = 0; r < inputs.size(); ++r) sources[r] = static_cast<const char*>(inputs[r]) + at * element;
    kernels().reduce(reduction, block, sources.data(), static_cast<int>(sources.size()), length);
    for (void* output : outputs) {
      if (streams) {
        kernels().stream(static_cast<char*>(output) + at * element, block, bytes);
      } else {
        std::memcpy(static_cast<char*>(output) + at * element, block, bytes);
      }
    }
  }
  if (streams) kernels().stream_done();
}

}  // namespace

void reduce_into_all(const Reduction& reduction, const std::vector<void*>& outputs,
                     const std::vector<const void*>& inputs, size_t length) {
  const int ranks = static_cast<int>(inputs.size());
  if (kernels().reduce_into_all(reduction, outputs.data(), inputs.data(), ranks, length)) return;
  reduce_in_blocks(reduction, outputs, inputs, length, false);
}

void allreduce_arena(const DataPhase& phase) {
  Group& group = phase.group;
  const Header& header = phase.header();
  const Topology& topology = phase.topology();
  const Reduction reduction = reduction_of(phase.operation);
  const size_t element = size_of(header.dtype);
  const int ranks = topology.local_size();
  const Slice slice = slice_of(header.count, topology.local_rank, ranks, element);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  bool in_place = true;
  for (const int r : topology.local_ranks()) {
    const int global_rank = topology.peers[r].global_rank;
    inputs.push_back(group.arena()->at(global_rank, phase.headers[r]->input_location) + slice.begin * element);
    outputs.push_back(group.arena()->at(global_rank, phase.headers[r]->output_location) + slice.begin * element);
    in_place = in_place && inputs.back() == outputs.back();
  }
  const bool streams = !in_place && 2 * header.bytes() * static_cast<size_t>(ranks) > cached_bytes();
  constexpr size_t step = bytes_between_looks;
  for (size_t done = 0; done < slice.length; done += step / element) {
    const size_t length = std::min(step / element, slice.length - done), bytes = done ? step : 0;
    for (const void*& input : inputs) input = static_cast<const char*>(input) + bytes;
    for (void*& output : outputs) output = static_cast<char*>(output) + bytes;
    group.cross_memory().write_mapped([&] {
      if (streams) {
        reduce_in_blocks(reduction, outputs, inputs, length, streams);
      } else {
        reduce_into_all(reduction, outputs, inputs, length);
      }
    });
  }
  group.step_barrier(phase.deadline);
}

}  // namespace cc
