// Small tensors, which have travelled with the headers by the time that all ranks agree: every rank does the rest on
// its own. One exchange is all of the operation. Sums are formed in rank order on every rank, as everywhere.
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
  sources.clear();
  for (const int r : topology.order) {
    const Header* theirs = phase.headers[r];
    if (theirs->kind == Kind::join) continue;
    const void* payload = HostMemory::payload(theirs);
    sources.push_back(static_cast<const char*>(topology.size == 1 ? operation.input : payload) +
                      begin * size_of(header.dtype));
  }
  kernels().reduce(reduction_of(operation), operation.output, sources.data(), static_cast<int>(sources.size()), length);
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
