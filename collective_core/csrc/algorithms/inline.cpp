// Small tensors, which have travelled with the headers by the time that all ranks agree: every rank does the rest on
// its own. One exchange is all of the operation. Sums are formed in the same order on every rank, as everywhere.
#include <cstring>
#include <vector>

#include "algorithms/collectives.h"
#include "base/memory.h"

namespace cc {

// A reducescatter keeps its rows only.
void reduce_inline(const DataPhase& phase) {
  const Operation& operation = phase.operation;
  const Header& header = operation.header;
  const Topology& topology = phase.topology();
  uint64_t begin = 0, length = header.count;
  if (header.kind == Kind::reducescatter) {
    const auto rows = static_cast<uint64_t>(header.dims[0]);
    const Rows mine = rows_of(rows, topology.rank, topology.size);
    begin = mine.begin * (header.count / rows);
    length = mine.length * (header.count / rows);
  }
  std::vector<const void*>& sources = phase.group.sources();
  const auto gather = [&](const std::vector<int>& ranks) {
    sources.clear();
    for (const int r : ranks) {
      const Header* theirs = phase.headers[r];
      if (theirs->kind == Kind::join) continue;
      const void* payload = HostMemory::payload(theirs);
      sources.push_back(static_cast<const char*>(topology.size == 1 ? operation.input : payload) +
                        begin * size_of(header.dtype));
    }
    return static_cast<int>(sources.size());
  };
  const Reduction reduction = reduction_of(operation);
  if (topology.local_size() == 1 || !phase.group.adds_by_mesh()) {
    const int count = gather(topology.order);
    return kernels().reduce(reduction, operation.output, sources.data(), count, length);
  }
  const size_t bytes = round_up(length * accumulator_size_of(header.dtype), cache_line);
  char* sums = phase.group.staging(bytes * topology.hosts.size());
  std::vector<const void*> of_hosts;
  for (const std::vector<int>& ranks : topology.hosts) {
    char* sum = sums + of_hosts.size() * bytes;
    const int count = gather(ranks);
    if (!count) continue;
    kernels().accumulate(reduction, sum, true, sources.data(), count, length);
    of_hosts.push_back(sum);
  }
  finish_sums(reduction, operation.output, of_hosts, length);
}

void finish_sums(const Reduction& reduction, void* out, const std::vector<const void*>& sums, size_t length) {
  const bool is_half = accumulator_size_of(reduction.dtype) != size_of(reduction.dtype);
  const Reduction plain{is_half ? DType::f32 : reduction.dtype, reduction.op, 1, 1.0, 1.0};
  void* first = const_cast<void*>(sums[0]);
  kernels().accumulate(plain, first, false, sums.data() + 1, static_cast<int>(sums.size()) - 1, length);
  kernels().finish(reduction, out, first, length);
}

void broadcast_inline(const DataPhase& phase) {
  const Header& header = phase.header();
  if (header.root == phase.topology().rank) return;
  std::memcpy(phase.operation.output, HostMemory::payload(phase.headers[header.root]), header.bytes());
}

void allgather_inline(const DataPhase& phase) {
  const std::vector<uint64_t> offsets = begin_allgather(phase);
  for (size_t r = 0; r < phase.headers.size(); ++r) {
    const Header* theirs = phase.headers[r];
    std::memcpy(phase.operation.received_bytes() + offsets[r], HostMemory::payload(theirs), theirs->bytes());
  }
}

}  // namespace cc
