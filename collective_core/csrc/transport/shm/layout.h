// What lies where in the memory that the ranks of a host share.
//
//   ControlBlock   failure record, signals
//   slots          2 (parity of the sequence number) x size, rounded up to pairs, x (Header + inline payload), by rank,
//                  where pairs take turns (host_memory.h)
//   leads          2 x size, of several hosts: in whose slot a rank's header is
//   in             local_size x 2 x chunk_bytes    each rank's own data on its way in
//   out            2 x chunk_bytes                 results, written slice by slice by different ranks
#pragma once

#include <sched.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/operation.h"
#include "base/topology.h"
#include "base/wait.h"

namespace cc {

constexpr size_t cache_line = 64;
constexpr size_t page = 4096;
constexpr size_t large_page = size_t(2) << 20;
// One host: a rank's chunks stay in its own cache of half a MiB or more. Several hosts: a longer run for the network's
// pipeline.
constexpr size_t chunk_bytes_one_host = size_t(128) << 10;
constexpr size_t chunk_bytes_many_hosts = size_t(2) << 20;
// Inline payloads travel with the headers to every rank, so their sum over all ranks is kept near 64 KiB.
constexpr size_t inline_total = size_t(64) << 10;
constexpr size_t min_inline = 256;
constexpr size_t max_inline_one_host = 8192, max_inline_many_hosts = 4096;
// More ranks add no tensors that have come with headers: as many headers that differ take longer than some more steps.
constexpr size_t max_inline_sum = 4096;

// Of a header in its slot: so the payload behind it begins with a cache line, as tensors do.
constexpr size_t header_at = (cache_line - sizeof(Header) % cache_line) % cache_line;

constexpr int max_blamed = 32;         // ranks that a failure record can name
constexpr size_t failure_text = 2048;  // bytes of its sentence

// Written once, by the first rank of the host that meets a fatal failure.
struct FailureRecord {
  std::atomic<uint32_t> state;  // 0 nothing, 1 being written, 2 readable
  int32_t fault;
  int32_t blamed;
  int32_t ranks[max_blamed];
  char text[failure_text];
};

struct alignas(cache_line) RankCell {
  Signal published;             // sequence number of the last header in its slot
  Signal step;                  // steps of the data phases that it has finished
  Signal gathered;              // of many ranks: those that it and all below it in the tree have finished (group.cpp)
  std::atomic<uint32_t> left;   // it shut its engine down in good order
  std::atomic<uint32_t> moves;  // rises while bytes go between it and other hosts
  // Of cross-memory attach (cross_memory.h).
  uint32_t can_attach;  // it can read what the others have published
  uint64_t token;       // 0: it does not want to
  void* output;         // addresses in its own memory
  const void* input;
  std::atomic<uint32_t> closed;  // nobody may write there any more
  // Begun and ended into others' memory: odd while it writes. In a line of its own, as all look at `closed`.
  alignas(cache_line) std::atomic<uint32_t> writes;
  cpu_set_t cores;  // that it is bound to
};

struct ControlBlock {
  FailureRecord failure;
  std::atomic<uint32_t> leader_naps;  // rises while the first rank waits for other hosts
  Signal world;                       // sequence number up to which the other hosts' slots are filled
  Signal released;                    // of many ranks: steps that all of them have finished
  RankCell cells[1];                  // local_size of them
};

inline size_t round_up(size_t n, size_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

struct Layout {
  explicit Layout(const Topology& t)
      : local_size(static_cast<size_t>(t.local_size())),
        size(static_cast<size_t>(t.size)),
        slots(round_up(size, 2)),
        chunk_bytes(t.host_count() == 1 ? chunk_bytes_one_host : chunk_bytes_many_hosts) {
    const size_t share = inline_total / size / cache_line * cache_line;
    const size_t max_inline = t.host_count() == 1 ? max_inline_one_host : max_inline_many_hosts;
    inline_bytes = std::clamp(share, min_inline, max_inline);
    payload_bytes = std::max(inline_bytes, round_up(size * sizeof(int64_t), cache_line));  // the splits of an alltoall
    slot_bytes = header_at + sizeof(Header) + payload_bytes;
    slots_at = round_up(sizeof(ControlBlock) + local_size * sizeof(RankCell), page);
    leads_at = slots_at + 2 * slots * slot_bytes;
    in_at = round_up(leads_at + 2 * size * sizeof(uint32_t), page);
    out_at = in_at + local_size * 2 * chunk_bytes;
    total = out_at + 2 * chunk_bytes;
  }
  // Of a tensor that travels with its header.
  size_t inline_bytes_of(Kind kind) const { return is_reduction(kind) && size > max_inline_sum ? 0 : inline_bytes; }

  size_t local_size, size, slots, chunk_bytes;
  size_t inline_bytes = 0;
  size_t payload_bytes = 0;  // that fit behind a header
  size_t slot_bytes = 0, slots_at = 0, leads_at = 0, in_at = 0, out_at = 0, total = 0;
};

}  // namespace cc
