// Reduce-scatter: every rank ends with its own rows of the sum of all ranks' tensors.
//
// One host, P ranks: the tensor is cut into windows. A window holds, one after the other, a segment of every rank's
// rows, so that all ranks have equal work in every window:
//   1. every rank copies the window's P segments of its tensor into in[w % 2];
//   2. barrier;
//   3. rank i reduces segment i of all P buffers, in rank order, straight into its result.
// in[w % 2] is filled again for window w + 2, after the barrier of w + 1, which every rank reaches when it has reduced
// w. Bytes per rank for N bytes: read N, write N (in); read N, write N/P (reduce).
//
// Several hosts: an allreduce into scratch memory, of which each rank keeps its rows: the same bits as an allreduce, at
// its price, which is up to twice what a reduce-scatter has to send.
#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithms/collectives.h"
#include "algorithms/selection.h"
#include "core/memory.h"

namespace cc {

Rows rows_of(uint64_t rows, int rank, int size) {
  const uint64_t share = rows / static_cast<uint64_t>(size), more = rows % static_cast<uint64_t>(size);
  const auto index = static_cast<uint64_t>(rank);
  return {index * share + std::min(index, more), share + (index < more ? 1 : 0)};
}

void reduce_whole(const DataPhase& phase, char* sum, Algorithm allreduce) {
  const Operation& operation = phase.operation;
  const Header& header = operation.header;
  Operation whole;
  whole.header = header;
  whole.input = operation.input;
  whole.output = sum;
  whole.contributors = operation.contributors;
  allreduce(phase.with(whole));
  const auto rows = static_cast<uint64_t>(header.dims[0]);
  const uint64_t row_bytes = header.bytes() / rows;
  const Rows mine = rows_of(rows, phase.topology().rank, phase.topology().size);
  if (mine.length) std::memcpy(operation.output, sum + mine.begin * row_bytes, mine.length * row_bytes);
}

void reducescatter_local(const DataPhase& phase) {
  Group& group = phase.group;
  const Operation& operation = phase.operation;
  const Header& header = operation.header;
  const Topology& topology = phase.topology();
  const Reduction reduction = reduction_of(operation);
  const size_t element = size_of(header.dtype);
  const auto rows = static_cast<uint64_t>(header.dims[0]);
  const uint64_t row = header.count / rows;
  const size_t ranks = static_cast<size_t>(topology.size);
  const size_t segment = group.memory().layout().chunk_bytes / ranks / cache_line * cache_line / element;
  const char* input = static_cast<const char*>(operation.input);
  const uint64_t longest = rows_of(rows, 0, topology.size).length * row;

  std::vector<const void*> sources(ranks);
  uint64_t window = 0;
  for (uint64_t begin = 0; begin < longest; begin += segment, ++window) {
    const auto length_of = [&](int rank) {
      const uint64_t whole = rows_of(rows, rank, topology.size).length * row;
      return static_cast<size_t>(whole > begin ? std::min<uint64_t>(segment, whole - begin) : 0);
    };
    char* buffer = group.memory().in(topology.local_rank, window);
    for (int r = 0; r < topology.size; ++r) {
      const uint64_t at = rows_of(rows, r, topology.size).begin * row + begin;
      if (length_of(r)) std::memcpy(buffer + r * segment * element, input + at * element, length_of(r) * element);
    }
    group.step_barrier(phase.deadline);
    const size_t mine = length_of(topology.rank);
    if (!mine) continue;
    for (int r = 0; r < topology.size; ++r)
      sources[r] = group.memory().in(r, window) + topology.rank * segment * element;
    kernels().reduce(reduction, static_cast<char*>(operation.output) + begin * element, sources.data(), topology.size,
                     mine);
  }
}

void reducescatter_by_allreduce(const DataPhase& phase) {
  const std::unique_ptr<char[]> sum = memory_for(phase.header().bytes());
  reduce_whole(phase, sum.get(), allreduce_between_hosts(phase.topology()));
}

}  // namespace cc
