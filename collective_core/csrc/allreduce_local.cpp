// Allreduce of a large tensor among the P ranks of one host, through shared memory.
//
// The tensor is cut into chunks of chunk_bytes. For chunk c:
//   1. every rank copies its chunk into its own buffer in[c % 2];
//   2. barrier;
//   3. rank i reduces slice i (1/P of the chunk) of all P buffers, in rank order, into the shared out[c % 2];
//   4. every rank copies out[c % 2] into its tensor, after the barrier of chunk c + 1, which ends step 3 of chunk c.
// So there is one barrier per chunk, and the copying of one chunk overlaps the reduction of the next on other ranks.
//
// Buffers: 2 in per rank and 2 out per host. in[c % 2] is written again for chunk c + 2, after the barrier of c + 1,
// which every rank reaches only when its reduction of c is done. out[c % 2] is written again in step 3 of c + 2, after
// the barrier of c + 2, which every rank reaches only when it has copied chunk c.
//
// Bytes per rank for a tensor of N bytes: read N, write N (in); read N, write N/P (reduce); read N, write N (out). The
// buffers stay in cache, so memory itself sees about 2N.
//
// Order: element by element in[0] + in[1] + ... + in[P - 1], whatever the chunk or slice.
#include <algorithm>
#include <cstring>
#include <vector>

#include "collectives.h"

namespace cc {

void allreduce_local(Group& group, const Operation& operation, Deadline& deadline) {
  const Header& header = operation.header;
  const Topology& topology = group.topology();
  const Reduction reduction = reduction_of(header, operation.contributors);
  const size_t element = size_of(header.dtype);
  const uint64_t chunk_elements = group.layout().chunk_bytes / element;
  const uint64_t chunks = (header.count + chunk_elements - 1) / chunk_elements;
  const char* input = static_cast<const char*>(operation.input);
  char* output = static_cast<char*>(operation.output);
  const auto length_of = [&](uint64_t c) {
    return static_cast<size_t>(std::min(chunk_elements, header.count - c * chunk_elements));
  };

  std::vector<const void*> sources(static_cast<size_t>(topology.local_size()));
  for (uint64_t c = 0; c <= chunks; ++c) {
    if (c < chunks) {
      std::memcpy(group.in(topology.local_rank, c), input + c * chunk_elements * element, length_of(c) * element);
    }
    group.step_barrier(deadline);
    if (c < chunks) {
      const Slice slice = slice_of(length_of(c), topology.local_rank, topology.local_size(), element);
      for (int r = 0; r < topology.local_size(); ++r) sources[r] = group.in(r, c) + slice.begin * element;
      kernels().reduce(reduction, group.out(c) + slice.begin * element, sources.data(), topology.local_size(),
                       slice.length);
    }
    if (c > 0) {
      std::memcpy(output + (c - 1) * chunk_elements * element, group.out(c - 1), length_of(c - 1) * element);
    }
  }
}

}  // namespace cc
