// The algorithms, one file each, and what they share. selection.h chooses among them.
#pragma once

#include <cstdint>
#include <vector>

#include "algorithms/data_phase.h"
#include "kernels/kernels.h"

namespace cc {

// Of tensors that came with the headers, and of a single rank's, which need not travel (inline.cpp).
void reduce_inline(const DataPhase& phase);  // allreduce and reducescatter
void broadcast_inline(const DataPhase& phase);
void allgather_inline(const DataPhase& phase);

void allreduce_local(const DataPhase& phase);
// For tensors that lie in the arena on every rank of this host.
void allreduce_arena(const DataPhase& phase);
// Where Group::adds_by_mesh().
void allreduce_mesh(const DataPhase& phase);
void allreduce_ring(const DataPhase& phase);

// In the order of the mesh or the ring: of few bytes, where pays_in_few_steps.
void allreduce_few_steps(const DataPhase& phase);
bool pays_in_few_steps(const DataPhase& phase);
// The one to take of those between hosts.
Algorithm allreduce_between_hosts(const DataPhase& phase);

void broadcast(const DataPhase& phase);

// Reduces all ranks' `input` and leaves this rank's rows of the result in `output`.
void reducescatter_local(const DataPhase& phase);
// By cross-memory attach; where not all of these tensors can be attached to, as reducescatter_local.
void reducescatter_direct(const DataPhase& phase);
// Of inputs in the arena, in a host.
void reducescatter_arena(const DataPhase& phase);
void reducescatter_mesh(const DataPhase& phase);
void reducescatter_by_allreduce(const DataPhase& phase);

// Gathers all ranks' `input` into `received_bytes`, for which they allocate memory where `output` is none.
void allgather_local(const DataPhase& phase);
// By cross-memory attach, where all send as much; where not all of these tensors can be attached to, as
// allgather_local.
void allgather_direct(const DataPhase& phase);
// Of inputs in the arena, in a host.
void allgather_arena(const DataPhase& phase);
void allgather_by_broadcasts(const DataPhase& phase);
// Where Group::has_mesh().
void allgather_pairwise(const DataPhase& phase);
// Between hosts, of at most Layout::chunk_bytes in all.
void allgather_few_steps(const DataPhase& phase);

// Sends rows of `input` to every rank. Allocates `gathered`.
void alltoall(const DataPhase& phase);

// Over phase.external (external.cpp).
void external_allreduce(const DataPhase& phase);
void external_reducescatter(const DataPhase& phase);
void external_broadcast(const DataPhase& phase);
void external_allgather(const DataPhase& phase);
void external_alltoall(const DataPhase& phase);
// Any of these in the memory of a GPU: the library does all of it, and has the memory for what is received.
void external_on_gpu(const DataPhase& phase);

// ------------------------------------------------------------------------------------------------- shared parts

inline Reduction reduction_of(const Operation& operation) {
  const Header& header = operation.header;
  return {header.dtype, header.reduce, header.reduce == ReduceOp::average ? operation.contributors : 1, header.prescale,
          header.postscale};
}

// Where hosts' sums are added (mesh.cpp): of the ranks of a host, into a sum of the element's type, and of these sums.
// Half types: within a host a sum or average is divided by a power of two, exactly, so that it stays in range, and
// factors are applied to what hosts have sent, in float32.
Reduction reduction_within(const DataPhase& phase);
Reduction reduction_among_hosts(const DataPhase& phase);

// All outputs = the inputs, reduced in their order; outputs may be inputs (allreduce_arena.cpp).
void reduce_into_all(const Reduction& reduction, const std::vector<void*>& outputs,
                     const std::vector<const void*>& inputs, size_t length);

// Read or written in a host's memory, between looks whether another rank has failed or given up.
constexpr size_t bytes_between_looks = size_t(4) << 20;

// Where the input of another rank of this host lies, whose header says so.
inline const char* input_in_arena(const DataPhase& phase, int local_rank) {
  const int rank = phase.topology().local_ranks()[local_rank];
  return phase.group.arena()->at(phase.topology().peers[rank].global_rank, phase.headers[rank]->input_location);
}

// The part of n elements that worker `index` of `workers` takes; boundaries lie on cache lines so that no two workers
// write one line. Later slices may be shorter or empty.
struct Slice {
  size_t begin, length;
};
inline Slice slice_of(size_t n, int index, int workers, size_t element_bytes) {
  const size_t share =
      round_up((n + static_cast<size_t>(workers) - 1) / static_cast<size_t>(workers), cache_line / element_bytes);
  const size_t begin = static_cast<size_t>(index) * share < n ? static_cast<size_t>(index) * share : n;
  return {begin, n - begin < share ? n - begin : share};
}

// By cross-memory attach: `transfer`, which reads the others' inputs, and then a barrier, where all ranks of this host
// can attach to all of them; elsewhere `otherwise`.
template <class Transfer>
void run_attached(const DataPhase& phase, Algorithm otherwise, Transfer transfer) {
  CrossMemory& cross_memory = phase.group.cross_memory();
  const Operation& operation = phase.operation;
  if (!cross_memory.attach(operation.input, operation.header.bytes(), phase.deadline)) return otherwise(phase);
  transfer();
  phase.group.step_barrier(phase.deadline);
}

// Rows are dealt out as evenly as can be, the first ranks get one more.
struct Rows {
  uint64_t begin, length;
};
Rows rows_of(uint64_t rows, int rank, int size);
// A reducescatter by way of the whole sum, which `allreduce` forms part by part in `sum`, memory of sum_bytes_of bytes.
void reduce_by_allreduce(const DataPhase& phase, char* sum, Algorithm allreduce);
size_t sum_bytes_of(const Header& header);

// Copies `bytes` bytes from the root's `source` to every other rank's `target`. `chunk` counts the chunks of a series
// of broadcasts: it starts at 0 and must be handed on, because two successive chunks must not use the same buffer.
void broadcast_bytes(const DataPhase& phase, int root, const void* source, void* target, uint64_t bytes,
                     uint64_t* chunk);

// A leader's part in a broadcast of few bytes between hosts, which lie in `bytes`: receives them, or sends them on.
void broadcast_step(const DataPhase& phase, int root_host, char* bytes, size_t n, bool sends);

// Finds `received` in the headers and the memory for `received_bytes`. Returns where in it each rank's bytes start;
// they end where the next rank's start.
std::vector<uint64_t> begin_allgather(const DataPhase& phase);
std::vector<uint64_t> offsets_of(const DataPhase& phase);  // these, again
// Whether every rank's tensor has as many bytes as this one's.
bool all_send_as_much(const DataPhase& phase);

// splits[r][d] rows go from rank r to rank d.
using Splits = std::vector<std::vector<int64_t>>;
// As they came with the headers of an alltoall; a rank that has joined sends nothing. Throws Failure for those that are
// not of the rank's rows.
Splits splits_of_all(const Topology& topology, const std::vector<const Header*>& headers);
// As begin_allgather, from the splits.
std::vector<uint64_t> begin_alltoall(const DataPhase& phase, const Splits& splits);

}  // namespace cc
