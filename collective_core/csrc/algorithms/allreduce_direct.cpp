// Allreduce of a large tensor in ordinary memory among the P ranks of one host by cross-memory attach
// (cross_memory.h).
//
//   1. the ranks publish the addresses of their tensors, and try whether they can attach to all of them;
//   2. rank i reduces slice i (1/P), block by block: it copies the block of all other ranks here, reduces it in rank
//      order into its own result, and copies that into the results of all others. It begins with those of rank i + 1,
//      so that the ranks do not all use the tensor of one of them at a time;
//   3. barrier.
// Slices do not overlap, and what is written has been read from all ranks before, so results may be the tensors.
//
// Buffers: P-1 blocks, which stay in cache. Bytes per rank for a tensor of N bytes: read N, write N, and the copies of
// the blocks in cache: memory itself sees about 2N, and no line of a slice goes to any processor but its rank's.
//
// Order: element by element x0 + x1 + ... + x(P-1), whatever the slice or block.
#include <algorithm>
#include <vector>

#include "algorithms/collectives.h"

namespace cc {
namespace {

// Large enough that a system call's cost vanishes, small enough that all ranks' blocks fit into a cache.
size_t read_bytes_of(int ranks) {
  constexpr size_t least = size_t(128) << 10, all_together = size_t(512) << 10;
  return std::max(least, all_together / static_cast<size_t>(ranks) / cache_line * cache_line);
}

}  // namespace

void reduce_attached(const DataPhase& phase, const Slice& slice, char* result, bool spread) {
  Group& group = phase.group;
  const Operation& operation = phase.operation;
  const Header& header = operation.header;
  const Topology& topology = group.topology();
  const Reduction reduction = reduction_of(operation);
  const size_t element = size_of(header.dtype);
  const int ranks = topology.local_size(), me = topology.local_rank;
  const size_t read_bytes = read_bytes_of(ranks), most = read_bytes / element;
  char* blocks = group.staging(static_cast<size_t>(ranks - 1) * read_bytes);
  std::vector<const void*> sources(static_cast<size_t>(ranks));

  for (size_t done = 0; done < slice.length; done += most) {
    const size_t length = std::min(most, slice.length - done), at = (slice.begin + done) * element;
    group.failure_detector().throw_if_recorded();
    sources[me] = static_cast<const char*>(operation.input) + at;
    for (int k = 1; k < ranks; ++k) {
      const int r = (me + k) % ranks;
      char* copied = blocks + static_cast<size_t>(k - 1) * read_bytes;
      group.cross_memory().read_input(r, at, copied, length * element);
      sources[r] = copied;
    }
    char* reduced = result + done * element;
    kernels().reduce(reduction, reduced, sources.data(), ranks, length);
    for (int k = 1; spread && k < ranks; ++k)
      group.cross_memory().write_output((me + k) % ranks, at, reduced, length * element);
  }
}

void allreduce_direct(const DataPhase& phase) {
  const Operation& operation = phase.operation;
  run_attached(phase, operation.output, allreduce_local, [&] {
    const Topology& topology = phase.topology();
    const size_t element = size_of(operation.header.dtype);
    const Slice mine = slice_of(operation.header.count, topology.local_rank, topology.local_size(), element);
    reduce_attached(phase, mine, static_cast<char*>(operation.output) + mine.begin * element, true);
  });
}

}  // namespace cc
