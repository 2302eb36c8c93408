// All-to-all: rank r sends splits[r][d] rows to every rank d and receives the rows of all ranks in rank order.
//
// Inside a host: every rank streams what it has for ranks of its host through its buffer in[c % 2], chunk by chunk, and
// after the barrier of a chunk every rank copies out what is for itself. Buffers as in broadcast.cpp.
//
// Between hosts, where all have a mesh: rank k of a host sends what it has for another host to rank k there, straight
// from its tensor, and all connections move at once, so every byte crosses the network once. What is for rank k goes
// straight to its place; what is for others of its host goes through its buffer in[round % 2], window by window, and
// after the barrier of a round they copy it out. All ranks have the same number of rounds, and leave a round when
// they have sent and received all of it: whoever is in the earliest one is owed nothing by those who wait for it. Who
// has nothing for a partner sends that in every round, so that nobody waits at the end for longer than a round takes.
//
// Elsewhere one rank after the other broadcasts what it has for other hosts, and everyone keeps its own part: with H
// hosts a byte passes up to H - 1 links of the ring.
//
// Allgather between hosts that all have a mesh: the same, where rank k sends its block to rank k of every other host,
// for all ranks there, so a host sends the blocks of its ranks to each other host once.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "algorithms/slice_streams.h"
#include "base/memory.h"
#include "base/validation.h"

namespace cc {
namespace {

constexpr uint64_t round_bytes = uint64_t(64) << 20;  // that a rank alone on its host sends all others in a round

constexpr int all_ranks = -1;  // of a host

// Part of a rank's input that goes to one rank or to all_ranks, and where it lies in a stream that holds only some of
// the parts.
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

// Of what a rank with these splits sends to `ranks`, which are in order.
Stream stream_of(const std::vector<int64_t>& splits, uint64_t row_bytes, const std::vector<int>& ranks) {
  Stream stream;
  uint64_t from = 0;
  int before = 0;
  for (const int to : ranks) {
    for (; before < to; ++before) from += static_cast<uint64_t>(splits[before]) * row_bytes;
    const uint64_t bytes = static_cast<uint64_t>(splits[to]) * row_bytes;
    if (bytes) stream.pieces.push_back({to, from, stream.bytes, bytes});
    stream.bytes += bytes;
  }
  return stream;
}

// Of an allgather: all that a rank has.
Stream stream_of(uint64_t bytes) {
  Stream stream;
  if (bytes) stream.pieces.push_back({all_ranks, 0, 0, bytes});
  stream.bytes = bytes;
  return stream;
}

// The part of `piece` that lies in the stream's window [begin, begin + length).
Piece within(const Piece& piece, uint64_t begin, uint64_t length) {
  const uint64_t first = std::max(piece.at, begin), end = std::min(piece.at + piece.bytes, begin + length);
  return {piece.to, piece.from + (first - piece.at), first - begin, end > first ? end - first : 0};
}

// A part of a window: where it lies in the stream, and in this process.
struct Segment {
  uint64_t at, bytes;
  char* memory;
};

// One round between this rank and its partner on another host, over the connections of one number.
class PairStream : public SliceStream {
 public:
  PairStream(const DataPhase& phase, int partner, int number, std::vector<Segment> sends, std::vector<Segment> receives)
      : SliceStream(phase, partner, partner, number), sends_(std::move(sends)), receives_(std::move(receives)) {}

  bool done() const override { return !wants_to_receive() && !wants_to_send(); }
  bool wants_to_receive() const override { return received_ < receives_.size(); }
  bool wants_to_send() const override { return posted_ < sends_.size() || outgoing.completed() < outgoing.posted(); }

 private:
  void advance() override {
    for (; posted_ < sends_.size(); ++posted_) {
      const Segment& next = sends_[posted_];
      outgoing.post({operation_.header.sequence, Part::partial, next.at, next.bytes}, next.memory, next.bytes);
    }
    if (wants_to_send()) send();
    if (!wants_to_receive()) return;
    const SegmentHead* head = arrived();
    const Segment& next = receives_[received_];
    if (!head) return;
    if (head->sequence != operation_.header.sequence || head->part != Part::partial || head->begin != next.at ||
        head->length != next.bytes) {
      unexpected_segment();
    }
    if (receive(next.memory, next.bytes)) ++received_;
  }

  const std::vector<Segment> sends_, receives_;  // in their order
  size_t posted_ = 0, received_ = 0;
};

// What goes between this rank and its partner on another host.
struct Pair {
  int partner;
  Stream sends;
  std::vector<Stream> arrives;  // at this host, by the local rank whose partner sends it
  std::vector<int> partners;    // theirs
};

class PairwiseExchange {
 public:
  // `offsets`: where in what this rank receives each rank's bytes start. `stream(rank, ranks)`: of what a rank sends
  // these ranks of another host. `longest`: bytes of the longest of all ranks' streams.
  template <class StreamOf>
  PairwiseExchange(const DataPhase& phase, const std::vector<uint64_t>& offsets, StreamOf stream, uint64_t longest)
      : phase_(phase),
        topology_(phase.topology()),
        offsets_(offsets),
        sockets_(phase.group.connections().to.begin()->second.size()),
        window_((topology_.local_size() == 1 ? round_bytes : phase.group.memory().layout().chunk_bytes) /
                (topology_.hosts.size() - 1) / cache_line * cache_line),
        rounds_(longest / window_ + (longest % window_ != 0)) {
    for (int k = 1; k < topology_.host_count(); ++k) {
      const std::vector<int>& there = topology_.hosts[(topology_.host + k) % topology_.host_count()];
      Pair& pair = pairs_.emplace_back();
      pair.partner = there[topology_.local_rank];
      pair.sends = stream(topology_.rank, there);
      pair.partners = there;
      for (const int rank : there) pair.arrives.push_back(stream(rank, topology_.local_ranks()));
    }
  }

  void run() {
    for (uint64_t round = 0; round < rounds_; ++round) {
      move(round);
      if (topology_.local_size() == 1) continue;
      phase_.group.step_barrier(phase_.deadline);
      copy_mine(round);
    }
  }

 private:
  // Where a part of what `rank` sends this one goes.
  char* result(int rank, const Piece& part, const Piece& piece) const {
    return phase_.operation.received_bytes() + offsets_[rank] + (part.from - piece.from);
  }
  // Where a part of what comes from the host of a pair, and is for others, lies meanwhile.
  char* buffer(int local, size_t pair, uint64_t round, const Piece& part) const {
    return phase_.group.memory().in(local, round) + pair * window_ + part.at;
  }
  // Calls `take` with the parts of the stream that lie in the round's window, and their pieces.
  template <class Take>
  void each_part(const Stream& stream, uint64_t round, Take take) const {
    for (const Piece& piece : stream.pieces) {
      const Piece part = within(piece, round * window_, window_);
      if (part.bytes) take(part, piece);
    }
  }

  void move(uint64_t round) {
    char* input = const_cast<char*>(static_cast<const char*>(phase_.operation.input));
    SliceStreams streams;
    for (size_t p = 0; p < pairs_.size(); ++p) {
      const Pair& pair = pairs_[p];
      std::vector<std::vector<Segment>> sends(sockets_), receives(sockets_);
      // In turn to the connections, as many to each of a full window.
      const uint64_t turns = (window_ + segment_bytes * sockets_ - 1) / (segment_bytes * sockets_);
      const uint64_t most = round_up(window_ / (turns * sockets_) + 1, cache_line);
      const auto deal = [&](std::vector<std::vector<Segment>>* all, const Piece& part, char* memory, size_t* count) {
        for (uint64_t done = 0; done < part.bytes; done += most) {
          const uint64_t bytes = std::min<uint64_t>(most, part.bytes - done);
          (*all)[(*count)++ % sockets_].push_back({round * window_ + part.at + done, bytes, memory + done});
        }
      };
      size_t sent = 0, received = 0;
      each_part(pair.sends, round,
                [&](const Piece& part, const Piece&) { deal(&sends, part, input + part.from, &sent); });
      each_part(pair.arrives[topology_.local_rank], round, [&](const Piece& part, const Piece& piece) {
        const bool is_mine = part.to == topology_.rank || topology_.local_size() == 1;
        char* memory = is_mine ? result(pair.partner, part, piece) : buffer(topology_.local_rank, p, round, part);
        deal(&receives, part, memory, &received);
      });
      char* nothing = phase_.group.memory().in(topology_.local_rank, round);
      if (!sent) sends[0].push_back({round * window_, 0, nothing});
      if (!received) receives[0].push_back({round * window_, 0, nothing});
      for (size_t number = 0; number < sockets_; ++number) {
        streams.push_back(std::make_unique<PairStream>(phase_, pair.partner, static_cast<int>(number),
                                                       std::move(sends[number]), std::move(receives[number])));
      }
    }
    run_streams(phase_.group, streams, phase_.deadline);
  }

  // What has come to this host for this rank, and not to its place.
  void copy_mine(uint64_t round) {
    for (size_t p = 0; p < pairs_.size(); ++p) {
      for (int local = 0; local < topology_.local_size(); ++local) {
        each_part(pairs_[p].arrives[local], round, [&](const Piece& part, const Piece& piece) {
          if (part.to != all_ranks && (part.to != topology_.rank || local == topology_.local_rank)) return;
          kernels().copy(result(pairs_[p].partners[local], part, piece), buffer(local, p, round, part), part.bytes);
        });
      }
    }
  }

  const DataPhase& phase_;
  const Topology& topology_;
  const std::vector<uint64_t>& offsets_;
  const size_t sockets_;   // connections to a partner
  const uint64_t window_;  // bytes that a rank sends another host in a round
  const uint64_t rounds_;  // of all ranks
  std::vector<Pair> pairs_;
};

// Of the longest stream from a rank to the ranks of another host.
uint64_t longest_stream(const Topology& topology, const Splits& splits, uint64_t row_bytes) {
  int64_t longest = 0;
  for (const std::vector<int>& here : topology.hosts) {
    for (const std::vector<int>& there : topology.hosts) {
      for (const int rank : here) {
        int64_t rows = 0;
        for (const int to : there) rows += splits[rank][to];
        if (&here != &there) longest = std::max(longest, rows);
      }
    }
  }
  return static_cast<uint64_t>(longest) * row_bytes;
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
      if (part.bytes) kernels().copy(output + offsets[rank] + (part.from - piece.from), window + part.at, part.bytes);
    }
  };

  std::vector<Stream> streams;
  uint64_t longest = 0;
  for (const int rank : topology.local_ranks()) {
    streams.push_back(stream_of(splits[rank], row_bytes, topology.local_ranks()));
    longest = std::max(longest, streams.back().bytes);
  }
  const uint64_t chunk_bytes = group.memory().layout().chunk_bytes;
  uint64_t chunk = 0;
  for (uint64_t begin = 0; begin < longest; begin += chunk_bytes, ++chunk) {
    for (const Piece& piece : streams[topology.local_rank].pieces) {
      const Piece part = within(piece, begin, chunk_bytes);
      if (part.bytes)
        kernels().copy(group.memory().in(topology.local_rank, chunk) + part.at, input + part.from, part.bytes);
    }
    group.step_barrier(phase.deadline);
    for (int local = 0; local < topology.local_size(); ++local) {
      keep_mine(streams[local], topology.local_ranks()[local], group.memory().in(local, chunk), begin, chunk_bytes);
    }
  }
  if (topology.host_count() == 1) return;

  // The last chunk may still be read: what follows begins with a barrier's distance.
  group.step_barrier(phase.deadline);
  if (group.has_mesh()) {
    const auto stream = [&](int rank, const std::vector<int>& ranks) {
      return stream_of(splits[rank], row_bytes, ranks);
    };
    return PairwiseExchange(phase, offsets, stream, longest_stream(topology, splits, row_bytes)).run();
  }
  chunk = 0;
  for (int root = 0; root < topology.size; ++root) {
    std::vector<int> elsewhere;
    for (const std::vector<int>& ranks : topology.hosts) {
      if (&ranks != &topology.hosts[topology.host_of(root)])
        elsewhere.insert(elsewhere.end(), ranks.begin(), ranks.end());
    }
    std::sort(elsewhere.begin(), elsewhere.end());
    const Stream stream = stream_of(splits[root], row_bytes, elsewhere);
    if (!stream.bytes) continue;
    const std::unique_ptr<char[]> packed = memory_for(stream.bytes);
    if (root == topology.rank) {
      for (const Piece& piece : stream.pieces) std::memcpy(packed.get() + piece.at, input + piece.from, piece.bytes);
    }
    broadcast_bytes(phase, root, packed.get(), packed.get(), stream.bytes, &chunk);
    keep_mine(stream, root, packed.get(), 0, stream.bytes);
  }
}

void allgather_pairwise(const DataPhase& phase) {
  allgather_local(phase);
  phase.group.step_barrier(phase.deadline);  // the last chunk may still be read
  const std::vector<uint64_t> offsets = offsets_of(phase);
  const auto stream = [&](int rank, const std::vector<int>& /*ranks*/) {
    return stream_of(offsets[rank + 1] - offsets[rank]);
  };
  uint64_t longest = 0;
  for (const Header* header : phase.headers) longest = std::max(longest, header->bytes());
  PairwiseExchange(phase, offsets, stream, longest).run();
}

}  // namespace cc
