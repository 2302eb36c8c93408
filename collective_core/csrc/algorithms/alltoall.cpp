// All-to-all: rank r sends splits[r][d] rows to every rank d and receives the rows of all ranks in rank order.
//
// Inside a host: every rank streams what it has for ranks of its host through its buffer in[c % 2], chunk by chunk, and
// after the barrier of a chunk every rank copies out what is for itself. Buffers as in broadcast.cpp.
//
// Between hosts: one rank after the other broadcasts what it has for other hosts, and everyone keeps its own part. With
// two hosts no byte crosses the network in vain; with H hosts a byte passes up to H - 1 links of the ring instead of
// the one that a direct connection would take, also where hosts with one rank each have those for their sums.
#include <algorithm>
#include <cstring>
#include <vector>

#include "algorithms/collectives.h"
#include "base/memory.h"
#include "base/validation.h"

namespace cc {
namespace {

// Part of a rank's input that goes to one rank, and where it lies in a stream that holds only some of the parts.
struct Piece {
  int to;
  uint64_t from;  // byte of the input
  uint64_t at;    // byte of the stream
  uint64_t bytes;
};

struct Stream {
  std::vector<Piece> pieces;
  uint64_t bytes = 0;
};

Stream stream_of(const Topology& topology, const std::vector<int64_t>& splits, uint64_t row_bytes, int rank,
                 bool same_host) {
  Stream stream;
  uint64_t from = 0;
  for (int to = 0; to < topology.size; ++to) {
    const uint64_t bytes = static_cast<uint64_t>(splits[to]) * row_bytes;
    if ((topology.host_of(to) == topology.host_of(rank)) == same_host && bytes) {
      stream.pieces.push_back({to, from, stream.bytes, bytes});
      stream.bytes += bytes;
    }
    from += bytes;
  }
  return stream;
}

// The part of `piece` that lies in the stream's window [begin, begin + length).
Piece within(const Piece& piece, uint64_t begin, uint64_t length) {
  const uint64_t first = std::max(piece.at, begin), end = std::min(piece.at + piece.bytes, begin + length);
  return {piece.to, piece.from + (first - piece.at), first - begin, end > first ? end - first : 0};
}

}  // namespace

Splits splits_of_all(const Topology& topology, const std::vector<const Header*>& headers) {
  Splits splits(headers.size(), std::vector<int64_t>(headers.size(), 0));
  for (size_t r = 0; r < headers.size(); ++r) {
    if (headers[r]->kind != Kind::alltoall) continue;
    std::memcpy(splits[r].data(), HostMemory::payload(headers[r]), splits[r].size() * sizeof(int64_t));
    if (are_valid_splits(splits[r], *headers[r], headers[r]->row_bytes())) continue;
    throw Failure(Fault::internal,
                  topology.describe(static_cast<int>(r)) + " sent splits that are not those of its rows",
                  {static_cast<int>(r)});
  }
  return splits;
}

std::vector<uint64_t> begin_alltoall(const DataPhase& phase, const Splits& splits) {
  Operation& operation = phase.operation;
  std::vector<uint64_t> offsets(splits.size() + 1, 0);
  operation.received.resize(splits.size());
  for (size_t r = 0; r < splits.size(); ++r) {
    operation.received[r] = splits[r][phase.topology().rank];
    offsets[r + 1] = offsets[r] + static_cast<uint64_t>(operation.received[r]) * operation.header.row_bytes();
  }
  operation.gathered_bytes = offsets.back();
  operation.gathered = memory_for(operation.gathered_bytes);
  return offsets;
}

void alltoall(const DataPhase& phase) {
  Group& group = phase.group;
  const Topology& topology = phase.topology();
  const uint64_t row_bytes = phase.header().row_bytes();
  const Splits splits = splits_of_all(topology, phase.headers);
  const std::vector<uint64_t> offsets = begin_alltoall(phase, splits);  // in what this rank receives
  const char* input = static_cast<const char*>(phase.operation.input);
  char* output = phase.operation.received_bytes();

  // Copies what window [begin, begin + length) of rank's stream, which lies in `window`, holds for this rank.
  const auto keep_mine = [&](const Stream& stream, int rank, const char* window, uint64_t begin, uint64_t length) {
    for (const Piece& piece : stream.pieces) {
      if (piece.to != topology.rank) continue;
      const Piece part = within(piece, begin, length);
      if (part.bytes) std::memcpy(output + offsets[rank] + (part.from - piece.from), window + part.at, part.bytes);
    }
  };

  std::vector<Stream> streams;
  uint64_t longest = 0;
  for (const int rank : topology.local_ranks()) {
    streams.push_back(stream_of(topology, splits[rank], row_bytes, rank, true));
    longest = std::max(longest, streams.back().bytes);
  }
  const uint64_t chunk_bytes = group.memory().layout().chunk_bytes;
  uint64_t chunk = 0;
  for (uint64_t begin = 0; begin < longest; begin += chunk_bytes, ++chunk) {
    for (const Piece& piece : streams[topology.local_rank].pieces) {
      const Piece part = within(piece, begin, chunk_bytes);
      if (part.bytes)
        std::memcpy(group.memory().in(topology.local_rank, chunk) + part.at, input + part.from, part.bytes);
    }
    group.step_barrier(phase.deadline);
    for (int local = 0; local < topology.local_size(); ++local) {
      keep_mine(streams[local], topology.local_ranks()[local], group.memory().in(local, chunk), begin, chunk_bytes);
    }
  }
  if (topology.host_count() == 1) return;

  // The last chunk may still be read: the broadcasts begin with a barrier's distance.
  group.step_barrier(phase.deadline);
  chunk = 0;
  for (int root = 0; root < topology.size; ++root) {
    const Stream stream = stream_of(topology, splits[root], row_bytes, root, false);
    if (!stream.bytes) continue;
    const std::unique_ptr<char[]> packed = memory_for(stream.bytes);
    if (root == topology.rank) {
      for (const Piece& piece : stream.pieces) std::memcpy(packed.get() + piece.at, input + piece.from, piece.bytes);
    }
    broadcast_bytes(phase, root, packed.get(), packed.get(), stream.bytes, &chunk);
    keep_mine(stream, root, packed.get(), 0, stream.bytes);
  }
}

}  // namespace cc
