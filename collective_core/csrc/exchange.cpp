#include "exchange.h"

#include <poll.h>

#include <cstring>
#include <set>

#include "credible.h"

namespace cc {
namespace {

// Who waits for a waiting rank gives it time to find out, and to say, whom it waits for in turn.
constexpr double grace_of_leader = 1.0;    // s beyond the deadline: a leader, for other leaders
constexpr double grace_of_follower = 2.0;  // s: any other rank, for its leader
constexpr int nap_ms = static_cast<int>(nap_ns / 1000000);

// Progress of one leader's frame in each direction.
struct Swap {
  int host = 0;
  int rank = 0;
  int fd = -1;
  size_t sent = 0;
  Frame frame{};
  size_t frame_got = 0;
  std::vector<char> block;
  size_t block_got = 0;
  bool received = false;
};

}  // namespace

void Exchange::run(Header* header, const void* payload, Deadline& deadline) {
  const Topology& topology = group_.topology();
  header->sequence = ++sequence_;
  Header* mine = group_.slot(sequence_, topology.rank);
  std::memcpy(mine, header, sizeof *header);
  if (header->inline_bytes) std::memcpy(Group::payload(mine), payload, header->inline_bytes);
  raise_signal(group_.my_cell().published, sequence_);

  const bool alone = topology.host_count() == 1;
  if (alone || topology.is_leader()) wait_for_local(deadline);
  if (alone) return;
  if (topology.is_leader()) {
    swap_blocks(deadline);
    raise_signal(group_.control().world, sequence_);
    return;
  }
  const int leader = topology.local_ranks()[0];
  wait_until(group_.control().world, sequence_, group_.patience(), [&] {
    group_.liveness().check_waiting_for(leader);
    const std::vector<int> missing = missing_here();
    group_.warn_if_due(missing, deadline);
    if (!deadline.passed_by(grace_of_follower)) return;
    group_.timed_out(missing.empty() ? std::vector<int>{leader} : missing, deadline);
  });
}

std::vector<int> Exchange::missing_here() const {
  std::vector<int> missing;
  for (int local = 0; local < group_.topology().local_size(); ++local) {
    if (!has_reached(group_.cell(local).published, sequence_))
      missing.push_back(group_.topology().local_ranks()[local]);
  }
  return missing;
}

void Exchange::wait_for_local(Deadline& deadline) {
  const Topology& topology = group_.topology();
  for (int local = 0; local < topology.local_size(); ++local) {
    wait_until(group_.cell(local).published, sequence_, group_.patience(), [&] {
      group_.liveness().check_waiting_for(topology.local_ranks()[local]);
      const std::vector<int> missing = missing_here();
      group_.warn_if_due(missing, deadline);
      if (!deadline.passed()) return;
      if (!missing.empty()) group_.timed_out(missing, deadline);
    });
  }
}

void Exchange::swap_blocks(Deadline& deadline) {
  const Topology& topology = group_.topology();
  Frame frame{FrameType::block, sequence_, 0};
  outgoing_.assign(sizeof frame, 0);
  for (const int rank : topology.local_ranks()) {
    const Header* slot = group_.slot(sequence_, rank);
    const char* bytes = reinterpret_cast<const char*>(slot);
    outgoing_.insert(outgoing_.end(), bytes, bytes + sizeof(Header) + slot->inline_bytes);
  }
  frame.length = outgoing_.size() - sizeof frame;
  std::memcpy(outgoing_.data(), &frame, sizeof frame);

  std::vector<Swap> swaps;
  for (int host = 0; host < topology.host_count(); ++host) {
    if (host == topology.host) continue;
    Swap swap;
    swap.host = host;
    swap.rank = topology.leader_of(host);
    swap.fd = group_.connections().control.at(swap.rank).get();
    swaps.push_back(swap);
  }
  const size_t most_block = topology.size * (sizeof(Header) + group_.layout().inline_bytes);

  const auto lost = [&](int rank) {
    std::set<int> in_mid_frame;
    for (const Swap& swap : swaps) {
      if (!swap.received && swap.frame_got > 0) in_mid_frame.insert(swap.rank);
    }
    group_.liveness().lost(rank, in_mid_frame);
  };
  const auto advance = [&](Swap& swap) {
    bool moved = false;
    if (swap.sent < outgoing_.size()) {
      const ptrdiff_t n = send_some(swap.fd, outgoing_.data() + swap.sent, outgoing_.size() - swap.sent);
      // A peer that announced a failure and left cannot be sent to, but can still be read: fall through.
      if (n > 0) swap.sent += static_cast<size_t>(n), moved = true;
      if (n < 0 && swap.received) lost(swap.rank);
    }
    if (swap.received) return moved;
    if (swap.frame_got < sizeof(Frame)) {
      const ptrdiff_t n =
          receive_some(swap.fd, reinterpret_cast<char*>(&swap.frame) + swap.frame_got, sizeof(Frame) - swap.frame_got);
      if (n < 0) lost(swap.rank);
      swap.frame_got += static_cast<size_t>(n);
      if (swap.frame_got < sizeof(Frame)) return moved || n > 0;
      if (swap.frame.type != FrameType::block) {
        group_.liveness().take_news(swap.rank, swap.frame);  // throws, or it was a goodbye:
        throw Failure(Fault::peer_lost,
                      topology.describe(swap.rank) + " has shut its engine down while others wait for it", {swap.rank});
      }
      if (swap.frame.sequence != sequence_ || swap.frame.length > most_block) {
        throw Failure(Fault::internal, topology.describe(swap.rank) + " is out of step (internal error)", {swap.rank});
      }
      swap.block.resize(swap.frame.length);
    }
    while (swap.block_got < swap.block.size()) {
      const ptrdiff_t n = receive_some(swap.fd, swap.block.data() + swap.block_got, swap.block.size() - swap.block_got);
      if (n < 0) lost(swap.rank);
      if (n == 0) return true;
      swap.block_got += static_cast<size_t>(n);
    }
    place_block(swap.host, swap.block);
    swap.received = true;
    return true;
  };

  try {
    for (;;) {
      bool moved = false, done = true;
      for (Swap& swap : swaps) {
        moved = advance(swap) || moved;
        done = done && swap.received && swap.sent == outgoing_.size();
      }
      if (done) return;
      if (moved) continue;
      std::vector<pollfd> waiting;
      for (const Swap& swap : swaps) {
        const int events = (swap.sent < outgoing_.size() ? POLLOUT : 0) | (swap.received ? 0 : POLLIN);
        if (events) waiting.push_back({swap.fd, static_cast<short>(events), 0});
      }
      if (poll(waiting.data(), waiting.size(), nap_ms) > 0) continue;
      // Only local news here: the control connections are in the middle of their frames and read above.
      group_.liveness().check_host();
      std::vector<int> missing;
      for (const Swap& swap : swaps) {
        if (!swap.received) missing.push_back(swap.rank);
      }
      group_.warn_if_due(missing, deadline);
      if (!missing.empty() && deadline.passed_by(grace_of_leader)) group_.timed_out(missing, deadline);
    }
  } catch (const Failure&) {
    for (const Swap& swap : swaps) {
      if (swap.sent > 0 && swap.sent < outgoing_.size()) group_.liveness().mute(swap.rank);
    }
    throw;
  }
}

void Exchange::place_block(int host, const std::vector<char>& block) {
  const Topology& topology = group_.topology();
  size_t at = 0;
  for (const int rank : topology.hosts[host]) {
    Header header{};
    if (block.size() - at < sizeof header) break;
    std::memcpy(&header, block.data() + at, sizeof header);
    const size_t bytes = sizeof header + header.inline_bytes;
    if (header.inline_bytes > group_.layout().inline_bytes || block.size() - at < bytes) break;
    if (!is_credible(header, topology.size)) break;
    std::memcpy(group_.slot(sequence_, rank), block.data() + at, bytes);
    at += bytes;
  }
  if (at != block.size()) {
    throw Failure(Fault::internal,
                  "host " + std::to_string(host) + " sent a block that cannot be read (internal error)");
  }
}

}  // namespace cc
