// Allgather of blocks of any size, B bytes in all: every rank ends with every rank's block, in rank order.
//
// One host: per chunk, every rank copies its part into in[c % 2], barrier, every rank copies out all others' parts. One
// barrier per chunk; buffers as in broadcast.cpp. Each rank reads and writes B bytes.
//
// Several hosts: one broadcast per block, one after the other. Every block crosses every link but one, and while a long
// block is on its way all links are busy, so the time approaches (H - 1) / H * B / bandwidth ... B / bandwidth, as on a
// ring.
#include <algorithm>
#include <cstring>

#include "algorithms/collectives.h"
#include "core/memory.h"

namespace cc {

std::vector<uint64_t> begin_allgather(const DataPhase& phase) {
  Operation& operation = phase.operation;
  const size_t size = phase.headers.size();
  std::vector<uint64_t> offsets(size + 1, 0);
  operation.received.resize(size);
  for (size_t r = 0; r < size; ++r) {
    offsets[r + 1] = offsets[r] + phase.headers[r]->bytes();  // of a rank that has joined: nothing
    operation.received[r] = phase.headers[r]->dims[0];
  }
  operation.gathered_bytes = offsets[size];
  operation.gathered = memory_for(operation.gathered_bytes);
  return offsets;
}

void allgather_local(const DataPhase& phase) {
  Group& group = phase.group;
  const Topology& topology = phase.topology();
  const uint64_t chunk_bytes = group.memory().layout().chunk_bytes;
  const std::vector<uint64_t> offsets = begin_allgather(phase);
  const char* input = static_cast<const char*>(phase.operation.input);
  char* output = phase.operation.gathered.get();
  uint64_t longest = 0;
  for (int r = 0; r < topology.size; ++r) longest = std::max(longest, offsets[r + 1] - offsets[r]);

  uint64_t chunk = 0;
  for (uint64_t begin = 0; begin < longest; begin += chunk_bytes, ++chunk) {
    const auto length_of = [&](int r) {
      const uint64_t block = offsets[r + 1] - offsets[r];
      return static_cast<size_t>(block > begin ? std::min(chunk_bytes, block - begin) : 0);
    };
    const size_t mine = length_of(topology.rank);
    if (mine) std::memcpy(group.memory().in(topology.local_rank, chunk), input + begin, mine);
    group.step_barrier(phase.deadline);
    for (int local = 0; local < topology.local_size(); ++local) {
      const int rank = topology.local_ranks()[local];
      if (length_of(rank))
        std::memcpy(output + offsets[rank] + begin, group.memory().in(local, chunk), length_of(rank));
    }
  }
}

void allgather_by_broadcasts(const DataPhase& phase) {
  const Topology& topology = phase.topology();
  const std::vector<uint64_t> offsets = begin_allgather(phase);
  const char* mine = static_cast<const char*>(phase.operation.input);
  uint64_t chunk = 0;
  for (int root = 0; root < topology.size; ++root) {
    const uint64_t bytes = offsets[root + 1] - offsets[root];
    char* block = phase.operation.gathered.get() + offsets[root];
    broadcast_bytes(phase, root, mine, block, bytes, &chunk);
    if (root == topology.rank && bytes) std::memcpy(block, mine, bytes);
  }
}

}  // namespace cc
