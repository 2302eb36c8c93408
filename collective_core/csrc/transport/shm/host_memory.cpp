#include "transport/shm/host_memory.h"

namespace cc {

HostMemory::HostMemory(const Topology& topology, const std::map<int, Fd>& local, double start_timeout)
    : local_rank_(topology.local_rank),
      has_leads_(topology.host_count() > 1),
      layout_(topology),
      control_(share(topology, local, start_timeout)) {}

ControlBlock& HostMemory::share(const Topology& topology, const std::map<int, Fd>& local, double start_timeout) {
  const Deadline deadline(start_timeout);
  if (topology.is_leader()) {
    memory_.create(layout_.total);
    for (const auto& entry : local) send_fd(entry.second.get(), memory_.fd().get(), deadline);
  } else {
    memory_.adopt(receive_fd(local.at(topology.local_ranks()[0]).get(), deadline), layout_.total);
  }
  memory_.close_fd();
  // A new memfd is all zeros, which is the initial state of every signal and record.
  return *reinterpret_cast<ControlBlock*>(memory_.data());
}

}  // namespace cc
