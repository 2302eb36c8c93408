// The first act of every collective: all ranks learn all ranks' headers, and their payloads if small.
//
// Inside a host: each rank writes header and payload into its slot and raises its `published` signal to the sequence
// number; everyone waits for everyone's signal. One shot, no trailing barrier: slots alternate by the parity of the
// sequence, and pairs of ranks swap theirs every other time (host_memory.h). A slot is written again only after the
// exchange in between, for which all ranks must have finished reading it; so of the last exchange alone is anything
// there to be read.
//
// Between hosts: the leader waits for its host's slots, swaps them for those of all other hosts (host_negotiation.h),
// and raises `world`. Per exchange and leader, with H hosts: H - 1 messages in one step for up to eight hosts,
// ceil(log2 H) messages in as many steps for more. Their bytes are those of one header where all ranks ask for the
// same, plus the small payloads. This is also the barrier, and the whole of a small allreduce or broadcast.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/counters.h"
#include "group/group.h"
#include "negotiation/host_negotiation.h"

namespace cc {

class Exchange {
 public:
  explicit Exchange(Group& group) : group_(group), host_negotiation_(group) {}

  // Sets header->sequence. Afterwards group.memory().header_of(header->sequence, r) is rank r's header for every r.
  void run(Header* header, const void* payload, Deadline& deadline);
  // On the leaders, of what the latest one has agreed on (host_negotiation.h).
  void run_steps(const std::vector<DisseminationStep>& steps, const StepContent& content, Deadline& deadline) {
    host_negotiation_.run_steps(sequence_, steps, content, deadline);
  }
  // Another one of the same operation, with no payload: who was late stays the rank that its first one waited for.
  void run_again(Header* header, Deadline& deadline);
  const Traffic& traffic() const { return host_negotiation_.traffic(); }
  // Since they were taken last.
  Waits take_waits() { return std::exchange(waits_, {}); }

 private:
  void wait_for_local(Deadline& deadline);

  Group& group_;
  HostNegotiation host_negotiation_;
  uint32_t sequence_ = 0;
  Waits waits_;
};

}  // namespace cc
