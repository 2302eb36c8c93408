// Allreduce of a large tensor in ordinary memory among the P ranks of one host, through chunks in shared memory.
//
// The tensor is cut into chunks of chunk_bytes, a chunk into one slice per rank. For chunk c:
//   1. every rank copies the other ranks' slices of its chunk into its own buffer in[c % 2];
//   2. barrier;
//   3. rank i reduces slice i, in rank order, of all ranks' buffers and of its own tensor, and stores it where it has
//      read it, into all of these buffers, and into its own result;
//   4. every rank copies the other slices of its buffer into its result, after the barrier of chunk c + 1, which ends
//      step 3 of chunk c.
// So there is one barrier per chunk, and the copying of one chunk overlaps the reduction of the next on other ranks.
// What is reduced in place goes from cache to cache twice, there and back; of results in other memory every line would
// also be taken from those who have read it last.
//
// Buffers: 2 per rank. in[c % 2] is written again for chunk c + 2, when this rank has copied chunk c out of it. The
// result may be the tensor itself: slice i of it is read by rank i alone, before it is written.
//
// Bytes per rank for a tensor of N bytes, with M = N (P-1)/P: read M, write M (in); read N, write N (reduce); read M,
// write M (out). The buffers stay in cache, so memory itself sees about 2N.
//
// Order: element by element x0 + x1 + ... + x(P-1), whatever the chunk or slice.
#include <algorithm>
#include <vector>

#include "algorithms/collectives.h"

namespace cc {
namespace {

// Copies all of a chunk of `length` elements but one slice.
void copy_around(char* target, const char* source, size_t length, const Slice& hole, size_t element) {
  const size_t end = hole.begin + hole.length;
  kernels().copy(target, source, hole.begin * element);
  kernels().copy(target + end * element, source + end * element, (length - end) * element);
}

}  // namespace

void allreduce_local(const DataPhase& phase) {
  Group& group = phase.group;
  const Operation& operation = phase.operation;
  const Header& header = operation.header;
  const Topology& topology = group.topology();
  const Reduction reduction = reduction_of(operation);
  const size_t element = size_of(header.dtype);
  const int ranks = topology.local_size(), me = topology.local_rank;
  const uint64_t chunk_elements = group.memory().layout().chunk_bytes / element;
  const uint64_t chunks = (header.count + chunk_elements - 1) / chunk_elements;
  const char* input = static_cast<const char*>(operation.input);
  char* output = static_cast<char*>(operation.output);
  const auto length_of = [&](uint64_t c) {
    return static_cast<size_t>(std::min(chunk_elements, header.count - c * chunk_elements));
  };
  const auto mine_of = [&](uint64_t c) { return slice_of(length_of(c), me, ranks, element); };
  const auto offset_of = [&](uint64_t c) { return c * chunk_elements * element; };

  std::vector<const void*> inputs(static_cast<size_t>(ranks));
  std::vector<void*> outputs(static_cast<size_t>(ranks));
  for (uint64_t c = 0; c <= chunks; ++c) {
    if (c < chunks) copy_around(group.memory().in(me, c), input + offset_of(c), length_of(c), mine_of(c), element);
    group.step_barrier(phase.deadline);
    if (c < chunks) {
      const Slice mine = mine_of(c);
      const size_t at = mine.begin * element;
      for (int r = 0; r < ranks; ++r) inputs[r] = outputs[r] = group.memory().in(r, c) + at;
      inputs[me] = input + offset_of(c) + at;
      outputs[me] = output + offset_of(c) + at;
      reduce_into_all(reduction, outputs, inputs, mine.length);
    }
    if (c > 0)
      copy_around(output + offset_of(c - 1), group.memory().in(me, c - 1), length_of(c - 1), mine_of(c - 1), element);
  }
}

}  // namespace cc
