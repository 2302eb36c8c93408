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
// One host, in the arena or by cross-memory attach: every rank reads its rows of the others' tensors where they lie,
// block by block, and reduces them, in rank order, into its result; then barrier. Bytes per rank: read N, of which N/P
// are its own; write N/P.
//
// Several hosts that add by a mesh, and can reach their ranks' tensors: the first half of an allreduce (mesh.cpp), but
// of few bytes, of which an allreduce takes fewer steps.
//
// Other hosts: allreduces of one part of the tensor after the other into the same memory of 16 MiB, of which
// each rank keeps its rows: the same bits as an allreduce, at its price, which is up to twice what a reduce-scatter has
// to send. Bytes per rank beside those of the allreduce: read and write N/P, from memory that has just been written.
// Parts follow each other without a pause where a rank is alone on its host: the next one's first sums are on their way
// while other hosts still have this one's results.
#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithms/collectives.h"

namespace cc {
namespace {

constexpr uint64_t largest_part = uint64_t(16) << 20;  // bytes; the hosts of a ring have many segments of it in flight

// Large enough that a system call's cost vanishes, small enough that all ranks' blocks fit into a cache.
size_t read_bytes_of(int ranks) {
  constexpr size_t least = size_t(128) << 10, all_together = size_t(512) << 10;
  return std::max(least, all_together / static_cast<size_t>(ranks) / cache_line * cache_line);
}

// Reduces this rank's rows of the tensors of the ranks of this host, in rank order, into the output, block by block.
// `read` finds those of another rank: read(local rank, number among the others, byte, bytes). It begins with those of
// the next rank, so that the ranks do not all use the tensor of one of them at a time.
template <class Read>
void reduce_rows(const DataPhase& phase, Read read) {
  Group& group = phase.group;
  const Operation& operation = phase.operation;
  const Topology& topology = group.topology();
  const Reduction reduction = reduction_of(operation);
  const size_t element = size_of(reduction.dtype);
  const int ranks = topology.local_size(), me = topology.local_rank;
  const auto rows = static_cast<uint64_t>(operation.header.dims[0]);
  const uint64_t row = operation.header.count / rows;
  const Rows kept = rows_of(rows, topology.rank, topology.size);
  const Slice slice{kept.begin * row, kept.length * row};
  const size_t read_bytes = read_bytes_of(ranks), most = read_bytes / element;
  std::vector<const void*> sources(static_cast<size_t>(ranks));

  for (size_t done = 0; done < slice.length; done += most) {
    const size_t length = std::min(most, slice.length - done), at = (slice.begin + done) * element;
    group.failure_detector().throw_if_recorded();
    sources[me] = static_cast<const char*>(operation.input) + at;
    for (int k = 1; k < ranks; ++k) {
      const int r = (me + k) % ranks;
      sources[r] = read(r, k - 1, at, length * element);
    }
    kernels().reduce(reduction, static_cast<char*>(operation.output) + done * element, sources.data(), ranks, length);
  }
  group.cross_memory().check_open();
}

}  // namespace

Rows rows_of(uint64_t rows, int rank, int size) {
  const uint64_t share = rows / static_cast<uint64_t>(size), more = rows % static_cast<uint64_t>(size);
  const auto index = static_cast<uint64_t>(rank);
  return {index * share + std::min(index, more), share + (index < more ? 1 : 0)};
}

size_t sum_bytes_of(const Header& header) {
  return static_cast<size_t>(std::min<uint64_t>(header.bytes(), largest_part));
}

void reduce_by_allreduce(const DataPhase& phase, char* sum, Algorithm allreduce) {
  const Operation& operation = phase.operation;
  const Header& header = operation.header;
  const size_t element = size_of(header.dtype);
  const auto rows = static_cast<uint64_t>(header.dims[0]);
  const uint64_t row = header.count / rows, most = largest_part / element;
  const Rows kept = rows_of(rows, phase.topology().rank, phase.topology().size);
  const uint64_t kept_begin = kept.begin * row, kept_end = kept_begin + kept.length * row;
  Operation part;
  part.header = header;
  part.output = sum;
  part.contributors = operation.contributors;
  for (uint64_t begin = 0; begin < header.count; begin += most) {
    part.header.count = std::min(most, header.count - begin);
    part.input = static_cast<const char*>(operation.input) + begin * element;
    allreduce(phase.with(part));
    const uint64_t from = std::max(begin, kept_begin), to = std::min(begin + part.header.count, kept_end);
    if (from >= to) continue;
    std::memcpy(static_cast<char*>(operation.output) + (from - kept_begin) * element, sum + (from - begin) * element,
                (to - from) * element);
  }
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
      if (length_of(r)) kernels().copy(buffer + r * segment * element, input + at * element, length_of(r) * element);
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

void reducescatter_direct(const DataPhase& phase) {
  run_attached(phase, reducescatter_local, [&] {
    const int ranks = phase.topology().local_size();
    const size_t room = read_bytes_of(ranks);
    char* blocks = phase.group.staging(static_cast<size_t>(ranks - 1) * room);
    reduce_rows(phase, [&](int local, int other, size_t at, size_t bytes) {
      char* copy = blocks + static_cast<size_t>(other) * room;
      phase.group.cross_memory().read_input(local, at, copy, bytes);
      return copy;
    });
  });
}

void reducescatter_arena(const DataPhase& phase) {
  reduce_rows(phase, [&](int local, int, size_t at, size_t) { return input_in_arena(phase, local) + at; });
  phase.group.step_barrier(phase.deadline);
}

void reducescatter_by_allreduce(const DataPhase& phase) {
  char* sum = phase.group.sum(sum_bytes_of(phase.header()));
  reduce_by_allreduce(phase, sum, allreduce_between_hosts(phase));
}

}  // namespace cc
