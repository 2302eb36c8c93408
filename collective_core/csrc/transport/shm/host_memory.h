// The memory that the ranks of a host share, and what lies where in it (layout.h). The first rank of the host creates
// it and hands it to the others.
//
// Whoever loads and stores here does so directly: a small message within a host is two cache lines and a signal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "base/fd.h"
#include "base/operation.h"
#include "base/topology.h"
#include "transport/shm/layout.h"
#include "transport/shm/shared_memory.h"

namespace cc {

class HostMemory {
 public:
  // `local`: connections to the other ranks of this host.
  HostMemory(const Topology& topology, const std::map<int, Fd>& local, double start_timeout);

  const Layout& layout() const { return layout_; }
  ControlBlock& control() { return control_; }
  RankCell& cell(int local_rank) { return control_.cells[local_rank]; }
  RankCell& my_cell() { return cell(local_rank_); }

  // Two ranks take turns with two slots: a rank that writes where it has read last has these cache lines already. Each
  // of them would have to be called back from the other's cache otherwise, which takes three times as long.
  Header* slot(uint32_t sequence, int rank) {
    char* base = memory_.data() + layout_.slots_at + header_at;
    const size_t place = static_cast<size_t>(rank) ^ (sequence >> 1 & 1);
    return reinterpret_cast<Header*>(base + ((sequence & 1) * layout_.slots + place) * layout_.slot_bytes);
  }
  // Of several hosts: by rank, the rank in whose slot its header is.
  uint32_t* leads(uint32_t sequence) {
    return reinterpret_cast<uint32_t*>(memory_.data() + layout_.leads_at) + (sequence & 1) * layout_.size;
  }
  // Of an exchange that has ended.
  const Header* header_of(uint32_t sequence, int rank) {
    return slot(sequence, has_leads_ ? static_cast<int>(leads(sequence)[rank]) : rank);
  }
  static char* payload(Header* slot) { return reinterpret_cast<char*>(slot) + sizeof(Header); }
  static const char* payload(const Header* slot) { return reinterpret_cast<const char*>(slot) + sizeof(Header); }

  // Chunk buffers: two per rank, so that one chunk is filled while the previous one is still read.
  char* in(int local_rank, uint64_t chunk) {
    return memory_.data() + layout_.in_at + (static_cast<size_t>(local_rank) * 2 + (chunk & 1)) * layout_.chunk_bytes;
  }
  size_t chunks_bytes() const { return layout_.total - layout_.in_at; }
  char* out(uint64_t chunk) { return memory_.data() + layout_.out_at + (chunk & 1) * layout_.chunk_bytes; }

 private:
  ControlBlock& share(const Topology& topology, const std::map<int, Fd>& local, double start_timeout);

  const int local_rank_;
  const bool has_leads_;
  const Layout layout_;
  SharedMemory memory_;
  ControlBlock& control_;
};

}  // namespace cc
