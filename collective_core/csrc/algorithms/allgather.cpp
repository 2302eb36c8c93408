// Allgather of blocks of any size, B bytes in all: every rank ends with every rank's block, in rank order.
//
// One host: per chunk, every rank copies its part into in[c % 2], barrier, every rank copies out all others' parts. One
// barrier per chunk; buffers as in broadcast.cpp. Each rank reads and writes B bytes.
//
// One host, blocks in the arena, or by cross-memory attach of one length: every rank reads the others' blocks where
// they lie into its result, beginning with that of the next rank, then barrier. Each rank reads and writes B bytes
// once.
//
// Several hosts, more than few bytes (few_steps.cpp): pairwise (alltoall.cpp), (H - 1) / H B in and out of every host,
// or without a mesh one broadcast per block, one after the other, each of which crosses every link but one.
#include <algorithm>
#include <cstring>

#include "algorithms/collectives.h"
#include "base/memory.h"

namespace cc {
namespace {

// Calls read(local rank, byte of its block, target, bytes) for all blocks of the others.
template <class Read>
void read_blocks(const DataPhase& phase, Read read) {
  const Topology& topology = phase.topology();
  const Operation& operation = phase.operation;
  const std::vector<uint64_t> offsets = begin_allgather(phase);
  char* output = operation.received_bytes();
  char* mine = output + offsets[topology.rank];
  if (mine != operation.input) std::memcpy(mine, operation.input, operation.header.bytes());
  for (int k = 1; k < topology.local_size(); ++k) {
    const int local = (topology.local_rank + k) % topology.local_size(), rank = topology.local_ranks()[local];
    char* target = output + offsets[rank];
    const uint64_t block = offsets[rank + 1] - offsets[rank];
    for (uint64_t begin = 0; begin < block; begin += bytes_between_looks) {
      phase.group.failure_detector().throw_if_recorded();
      read(local, begin, target + begin, std::min<uint64_t>(bytes_between_looks, block - begin));
    }
  }
  phase.group.cross_memory().check_open();
}

}  // namespace

std::vector<uint64_t> offsets_of(const DataPhase& phase) {
  std::vector<uint64_t> offsets{0};
  for (const Header* header : phase.headers) offsets.push_back(offsets.back() + header->bytes());
  return offsets;
}

std::vector<uint64_t> begin_allgather(const DataPhase& phase) {
  Operation& operation = phase.operation;
  std::vector<uint64_t> offsets = offsets_of(phase);
  operation.received.clear();
  for (const Header* header : phase.headers) operation.received.push_back(header->dims[0]);  // 0 of one that has joined
  operation.gathered_bytes = offsets.back();
  if (!operation.output || !all_send_as_much(phase)) operation.gathered = memory_for(operation.gathered_bytes);
  return offsets;
}

bool all_send_as_much(const DataPhase& phase) {
  const uint64_t mine = phase.operation.header.bytes();
  return std::all_of(phase.headers.begin(), phase.headers.end(),
                     [&](const Header* header) { return header->bytes() == mine; });
}

void allgather_local(const DataPhase& phase) {
  Group& group = phase.group;
  const Topology& topology = phase.topology();
  const uint64_t chunk_bytes = group.memory().layout().chunk_bytes;
  const std::vector<uint64_t> offsets = begin_allgather(phase);
  const char* input = static_cast<const char*>(phase.operation.input);
  char* output = phase.operation.received_bytes();
  uint64_t longest = 0;
  for (int r = 0; r < topology.size; ++r) longest = std::max(longest, offsets[r + 1] - offsets[r]);

  uint64_t chunk = 0;
  for (uint64_t begin = 0; begin < longest; begin += chunk_bytes, ++chunk) {
    const auto length_of = [&](int r) {
      const uint64_t block = offsets[r + 1] - offsets[r];
      return static_cast<size_t>(block > begin ? std::min(chunk_bytes, block - begin) : 0);
    };
    const size_t mine = length_of(topology.rank);
    if (mine) kernels().copy(group.memory().in(topology.local_rank, chunk), input + begin, mine);
    group.step_barrier(phase.deadline);
    for (int local = 0; local < topology.local_size(); ++local) {
      const int rank = topology.local_ranks()[local];
      if (length_of(rank))
        kernels().copy(output + offsets[rank] + begin, group.memory().in(local, chunk), length_of(rank));
    }
  }
}

void allgather_direct(const DataPhase& phase) {
  run_attached(phase, allgather_local, [&] {
    read_blocks(phase, [&](int local, uint64_t at, char* target, uint64_t bytes) {
      phase.group.cross_memory().read_input(local, at, target, bytes);
    });
  });
}

void allgather_arena(const DataPhase& phase) {
  read_blocks(phase, [&](int local, uint64_t at, char* target, uint64_t bytes) {
    kernels().copy(target, input_in_arena(phase, local) + at, bytes);
  });
  phase.group.step_barrier(phase.deadline);
}

void allgather_by_broadcasts(const DataPhase& phase) {
  const Topology& topology = phase.topology();
  const std::vector<uint64_t> offsets = begin_allgather(phase);
  const char* mine = static_cast<const char*>(phase.operation.input);
  uint64_t chunk = 0;
  for (int root = 0; root < topology.size; ++root) {
    const uint64_t bytes = offsets[root + 1] - offsets[root];
    char* block = phase.operation.received_bytes() + offsets[root];
    broadcast_bytes(phase, root, mine, block, bytes, &chunk);
    if (root == topology.rank && bytes && block != mine) std::memcpy(block, mine, bytes);
  }
}

}  // namespace cc
