#include "algorithms/selection.h"

#include <algorithm>

#include "algorithms/collectives.h"

namespace cc {
namespace {

// Of a reduce-scatter's tensor or an allgather's block: for fewer bytes the system calls and page walks of cross-memory
// attach, which every rank makes for every other, take longer than a second copy in cache.
uint64_t min_direct_bytes(int ranks) {
  return (uint64_t(256) << 10) * static_cast<uint64_t>(ranks - 1);
}

// Whether every rank of this host has its tensor in the arena, of which an allreduce also writes the others' outputs.
bool all_in_arena(const DataPhase& phase) {
  const bool writes = phase.header().kind == Kind::allreduce;
  const std::vector<int>& ranks = phase.topology().local_ranks();
  return std::all_of(ranks.begin(), ranks.end(), [&](int r) {
    return phase.headers[r]->input_location && (phase.headers[r]->output_location || !writes);
  });
}

// Whether every rank's tensor has travelled with its header; of a rank that has joined it is empty.
bool all_inline(const DataPhase& phase) {
  return std::all_of(phase.headers.begin(), phase.headers.end(),
                     [](const Header* header) { return header->inline_bytes == header->bytes(); });
}

// Whether the ranks of this host may read these tensors of so many bytes where they lie, and it pays.
bool pays_to_attach(const DataPhase& phase, uint64_t bytes) {
  return bytes >= min_direct_bytes(phase.topology().local_size()) && phase.group.cross_memory().is_available();
}

// All that all ranks send.
bool fits_a_chunk(const DataPhase& phase) {
  uint64_t all = 0;
  for (const Header* header : phase.headers) all += header->bytes();
  return all <= phase.group.memory().layout().chunk_bytes;
}

}  // namespace

Algorithm allreduce_between_hosts(const DataPhase& phase) {
  if (pays_in_few_steps(phase)) return allreduce_few_steps;
  return phase.group.adds_by_mesh(phase.header()) ? allreduce_mesh : allreduce_ring;
}

Algorithm select_algorithm(const DataPhase& phase) {
  const Header& header = phase.header();
  const Topology& topology = phase.topology();
  const bool one_host = topology.host_count() == 1, alone = topology.size == 1;
  const bool is_small =
      header.bytes() <= phase.group.memory().layout().inline_bytes_of(header.kind);  // it has travelled with its header
  if (!has_tensor(header.kind)) return nullptr;
  if (header.device == Device::gpu_memory) return external_on_gpu;
  switch (header.kind) {
    case Kind::allreduce:
      if (header.count == 0) return nullptr;
      if (is_small || alone) return reduce_inline;
      if (phase.external) return external_allreduce;
      if (one_host) return all_in_arena(phase) ? allreduce_arena : allreduce_local;
      return allreduce_between_hosts(phase);
    case Kind::reducescatter:
      if (header.count == 0) return nullptr;
      if (is_small || alone) return reduce_inline;
      if (phase.external) return external_reducescatter;
      if (one_host && all_in_arena(phase)) return reducescatter_arena;
      if (one_host) return pays_to_attach(phase, header.bytes()) ? reducescatter_direct : reducescatter_local;
      return phase.group.adds_by_mesh(header) && !pays_in_few_steps(phase) ? reducescatter_mesh
                                                                           : reducescatter_by_allreduce;
    case Kind::broadcast:
      if (header.count == 0 || alone) return nullptr;
      if (is_small) return broadcast_inline;
      return phase.external ? external_broadcast : broadcast;
    case Kind::allgather:
      if (all_inline(phase)) return allgather_inline;
      if (phase.external) return external_allgather;
      if (!one_host && fits_a_chunk(phase)) return allgather_few_steps;
      if (!one_host) return phase.group.has_mesh() ? allgather_pairwise : allgather_by_broadcasts;
      if (all_in_arena(phase)) return allgather_arena;
      return all_send_as_much(phase) && pays_to_attach(phase, header.bytes()) ? allgather_direct : allgather_local;
    case Kind::alltoall:
      return phase.external ? external_alltoall : alltoall;
    case Kind::barrier:
    case Kind::join:
    case Kind::count:
      break;
  }
  return nullptr;
}

}  // namespace cc
