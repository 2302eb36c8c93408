// The first act of every collective: all ranks learn all ranks' headers, and their payloads if small.
//
// Inside a host: each rank writes header and payload into its slot and raises its `published` signal to the sequence
// number; everyone waits for everyone's signal. One shot, no trailing barrier: slots alternate by the parity of the
// sequence, and a rank can only reuse a slot after the exchange in between, for which all others must have finished
// reading it.
//
// Between hosts: the leader waits for its host's slots, sends them as one block to every other leader, receives theirs
// into the same slots, and raises `world`. Per exchange and host: (hosts - 1) messages of local_size * (192 + payload)
// bytes each way, all at once, so one network latency. This is also the barrier, and the whole of a small allreduce or
// broadcast.
#pragma once

#include <cstdint>
#include <vector>

#include "group.h"

namespace cc {

class Exchange {
 public:
  explicit Exchange(Group& group) : group_(group) {}

  // Sets header->sequence. Afterwards group.slot(header->sequence, r) holds rank r's header for every r.
  void run(Header* header, const void* payload, Deadline& deadline);

 private:
  std::vector<int> missing_here() const;
  void wait_for_local(Deadline& deadline);
  void swap_blocks(Deadline& deadline);
  void place_block(int host, const std::vector<char>& block);

  Group& group_;
  uint32_t sequence_ = 0;
  std::vector<char> outgoing_;
};

}  // namespace cc
