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
  const size_t element = size_of(header.dtype);
  const auto* input = static_cast<const char*>(operation.input);
  const auto* output = static_cast<const char*>(operation.output);
  const bool is_apart = output + length * element <= input || input + header.bytes() <= output;
  // This rank's own values are read where the caller has them: the slot's cache lines are on their way to the others.
  const bool has_travelled = header.inline_bytes == header.bytes();  // but for large ones of a rank that is alone
  const bool from_input = is_apart || output == input + begin * element || !has_travelled;
  std::vector<const void*>& sources = phase.group.sources();
  const auto gather = [&](const std::vector<int>& ranks) {
    sources.clear();
    for (const int r : ranks) {
      if (phase.headers[r]->kind == Kind::join) continue;
      const char* values = r == topology.rank && from_input
                               ? input
                               : HostMemory::payload(phase.group.memory().header_of(header.sequence, r));
      sources.push_back(values + begin * element);
    }
    return static_cast<int>(sources.size());
  };
  const Reduction reduction = reduction_of(operation);
  if (!phase.group.adds_by_host(header)) {
    const int count = gather(topology.order);
    return kernels().reduce(reduction, operation.output, sources.data(), count, length);
  }
  const Reduction within = reduction_within(phase);
  const size_t bytes = round_up(length * size_of(header.dtype), cache_line);
  char* sums = phase.group.staging(bytes * topology.hosts.size());
  std::vector<const void*> of_hosts;
  for (const std::vector<int>& ranks : topology.hosts) {
    char* sum = sums + of_hosts.size() * bytes;
    const int count = gather(ranks);
    if (!count) continue;
    kernels().reduce(within, sum, sources.data(), count, length);
    of_hosts.push_back(sum);
  }
  kernels().reduce(reduction_among_hosts(phase), operation.output, of_hosts.data(), static_cast<int>(of_hosts.size()),
                   length);
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
