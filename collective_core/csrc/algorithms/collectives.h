// The data phases of the collectives. Each runs after an exchange in which all ranks agreed, on all ranks, in the same
// order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "core/errors.h"
#include "core/group.h"
#include "core/operation.h"
#include "kernels/kernels.h"

namespace cc {

// contributors: Operation::contributors, not the number of ranks.
inline Reduction reduction_of(const Header& header, int contributors) {
  return {header.dtype, header.reduce, header.reduce == ReduceOp::average ? contributors : 1, header.prescale,
          header.postscale};
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

void allreduce_local(Group& group, const Operation& operation, Deadline& deadline);
// The same by cross-memory attach; false, and nothing was done, where not all of these tensors can be attached to. It
// makes 2 (P-1) system calls for a block of a slice, which cost more than a second copy in cache where the tensor has
// fewer bytes.
inline uint64_t min_direct_bytes(int ranks) {
  return (uint64_t(16) << 10) * static_cast<uint64_t>(ranks * (ranks - 1));
}
bool allreduce_direct(Group& group, const Operation& operation, Deadline& deadline);
// For tensors that lie in the arena on every rank of this host: `headers` (by rank) tell where.
void allreduce_arena(Group& group, const Operation& operation, const std::vector<const Header*>& headers,
                     Deadline& deadline);
void allreduce_ring(Group& group, const Operation& operation, const std::vector<const Header*>& headers,
                    Deadline& deadline);

// Copies `bytes` bytes from the root's `source` to every other rank's `target`. `chunk` counts the chunks of a series
// of broadcasts: it starts at 0 and must be handed on, because two successive chunks must not use the same buffer.
void broadcast_bytes(Group& group, int root, const void* source, void* target, uint64_t bytes, uint64_t* chunk,
                     Deadline& deadline);

// Reduces all ranks' `input` and leaves this rank's rows of the result in `output`. Rows are dealt out as evenly as can
// be, the first ranks get one more.
void reducescatter(Group& group, const Operation& operation, const std::vector<const Header*>& headers,
                   Deadline& deadline);
struct Rows {
  uint64_t begin, length;
};
Rows rows_of(uint64_t rows, int rank, int size);
// The same by way of the whole sum, which `allreduce` forms in `sum`.
void reduce_whole(Group& group, const Operation& operation, char* sum,
                  const std::function<void(const Operation&)>& allreduce);

// For data of other ranks, at least a byte of it. Throws Failure where there is not so much memory.
inline std::unique_ptr<char[]> memory_for(uint64_t bytes) {
  std::unique_ptr<char[]> memory(new (std::nothrow) char[std::max<uint64_t>(bytes, 1)]);
  if (!memory)
    throw Failure(Fault::internal,
                  "there is no memory for the " + std::to_string(bytes) + " bytes that it would receive");
  return memory;
}

// Sends rows of `input` to every rank: splits[r][d] rows go from rank r to rank d. Allocates `gathered`.
using Splits = std::vector<std::vector<int64_t>>;
// As they came with the headers of an alltoall; a rank that has joined sends nothing. Throws Failure for those that are
// not of the rank's rows.
Splits splits_of_all(const Topology& topology, const std::vector<const Header*>& headers);
// external: moves the data, or null.
class ExternalTransport;
void alltoall(Group& group, Operation& operation, const Splits& splits, const ExternalTransport* external,
              Deadline& deadline);

// Gathers all ranks' `input` into `output`, where rank r's bytes start at offsets[r] and end at offsets[r + 1].
void allgather_bytes(Group& group, const void* input, char* output, const std::vector<uint64_t>& offsets,
                     Deadline& deadline);

}  // namespace cc
