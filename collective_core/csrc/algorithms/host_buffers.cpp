#include "algorithms/host_buffers.h"

#include <algorithm>
#include <utility>

namespace cc {
namespace {

bool in_arena(const std::vector<int>& ranks, const std::vector<const Header*>& headers) {
  return std::all_of(ranks.begin(), ranks.end(),
                     [&](int r) { return headers[r]->input_location && headers[r]->output_location; });
}

bool attachable(const std::vector<int>& ranks, const std::vector<const Header*>& headers) {
  return std::all_of(ranks.begin(), ranks.end(), [&](int r) { return headers[r]->attachable != 0; });
}

HostBuffers whole(const DataPhase& phase, bool attaches) {
  const Topology& topology = phase.topology();
  const Operation& operation = phase.operation;
  HostBuffers buffers{0, operation.header.count, {}, {}, attaches};
  if (attaches || topology.local_size() == 1) {
    buffers.inputs = {static_cast<const char*>(operation.input)};
    buffers.outputs = {static_cast<char*>(operation.output)};
    return buffers;
  }
  const Arena& arena = *phase.group.arena();
  for (const int r : topology.local_ranks()) {
    const int global_rank = topology.peers[r].global_rank;
    buffers.inputs.push_back(arena.at(global_rank, phase.headers[r]->input_location));
    buffers.outputs.push_back(arena.at(global_rank, phase.headers[r]->output_location));
  }
  // Its own first: results are received there, and spread() writes those of the others, which may have given up.
  std::swap(buffers.outputs.front(), buffers.outputs[static_cast<size_t>(topology.local_rank)]);
  return buffers;
}

void run_in_chunks(const DataPhase& phase, void (*move)(const DataPhase&, const HostBuffers&)) {
  Group& group = phase.group;
  const Header& header = phase.header();
  const Topology& topology = phase.topology();
  const size_t element = size_of(header.dtype);
  const uint64_t chunk_elements = group.memory().layout().chunk_bytes / element;
  const char* input = static_cast<const char*>(phase.operation.input);
  char* output = static_cast<char*>(phase.operation.output);
  uint64_t chunk = 0;
  for (uint64_t begin = 0; begin < header.count; begin += chunk_elements, ++chunk) {
    const size_t length = static_cast<size_t>(std::min(chunk_elements, header.count - begin));
    kernels().copy(group.memory().in(topology.local_rank, chunk), input + begin * element, length * element);
    group.step_barrier(phase.deadline);
    if (topology.local_rank < topology.channels()) {
      HostBuffers buffers{begin, length, {}, {group.memory().out(chunk)}};
      for (int r = 0; r < topology.local_size(); ++r) buffers.inputs.push_back(group.memory().in(r, chunk));
      move(phase, buffers.part(slice_of(length, topology.local_rank, topology.channels(), element), element));
    }
    group.step_barrier(phase.deadline);
    kernels().copy(output + begin * element, group.memory().out(chunk), length * element);
  }
}

}  // namespace

HostBuffers HostBuffers::part(const Slice& slice, size_t element) const {
  HostBuffers buffers{begin + slice.begin, slice.length, inputs, outputs, attaches};
  for (const char*& input : buffers.inputs) input += slice.begin * element;
  for (char*& output : buffers.outputs) output += slice.begin * element;
  return buffers;
}

void HostBuffers::add_to(char* sum, bool fresh, const Reduction& reduction, size_t at, size_t count,
                         const DataPhase& phase, char* block) const {
  const size_t element = size_of(reduction.dtype);
  const Topology& topology = phase.topology();
  std::vector<const void*>& sources = phase.group.sources();
  sources.clear();
  for (const char* input : inputs) sources.push_back(input + at * element);
  if (!attaches) {
    kernels().accumulate(reduction, sum, fresh, sources.data(), static_cast<int>(sources.size()), count);
    return;
  }
  // The same sum, of one rank after the other.
  for (int r = 0; r < topology.local_size(); ++r) {
    const void* source = sources[0];
    if (r != topology.local_rank) {
      phase.group.cross_memory().read_input(r, (begin + at) * element, block, count * element);
      source = block;
    }
    kernels().accumulate(reduction, sum, fresh && r == 0, &source, 1, count);
  }
}

void HostBuffers::spread(size_t at, size_t count, const DataPhase& phase) const {
  const size_t element = size_of(phase.header().dtype);
  const char* result = outputs[0] + at * element;
  for (int r = 0; attaches && r < phase.topology().local_size(); ++r) {
    if (r == phase.topology().local_rank) continue;
    phase.group.cross_memory().write_output(r, (begin + at) * element, result, count * element);
  }
  if (outputs.size() < 2) return;
  phase.group.cross_memory().write_mapped([&] {
    for (size_t r = 1; r < outputs.size(); ++r) kernels().copy(outputs[r] + at * element, result, count * element);
  });
}

bool all_accessible(const DataPhase& phase) {
  const std::vector<std::vector<int>>& hosts = phase.topology().hosts;
  return std::all_of(hosts.begin(), hosts.end(), [&](const std::vector<int>& ranks) {
    return ranks.size() == 1 || in_arena(ranks, phase.headers) || attachable(ranks, phase.headers);
  });
}

void run_in_place(const DataPhase& phase, const std::function<void(const HostBuffers&)>& move) {
  const Topology& topology = phase.topology();
  const bool attaches = topology.local_size() > 1 && !in_arena(topology.local_ranks(), phase.headers);
  if (attaches) phase.group.cross_memory().publish(phase.operation.input, phase.operation.output, phase.deadline);
  if (topology.local_rank < topology.channels()) move(whole(phase, attaches));
  phase.group.step_barrier(phase.deadline);
}

void run_between_hosts(const DataPhase& phase, void (*move)(const DataPhase&, const HostBuffers&)) {
  if (!all_accessible(phase)) return run_in_chunks(phase, move);
  const Topology& topology = phase.topology();
  const size_t element = size_of(phase.header().dtype);
  const Slice mine = slice_of(phase.header().count, topology.local_rank, topology.channels(), element);
  run_in_place(phase, [&](const HostBuffers& buffers) { move(phase, buffers.part(mine, element)); });
}

}  // namespace cc
