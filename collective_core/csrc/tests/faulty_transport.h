// A network that misbehaves as one may, by seed: bytes move in small parts and late, each connection at its own pace,
// so that what was sent on two of them arrives in any order; and one connection is cut.
#pragma once

#include <atomic>
#include <random>

#include "tests/memory_transport.h"

struct Faults {
  uint64_t seed = 0;
  std::atomic<bool> armed{false};      // until then nothing is counted
  std::atomic<int64_t> until_cut{-1};  // bytes that are still sent, by anyone, before the sender's connection is cut
  std::atomic<int> cut_from{-1}, cut_to{-1};  // ranks in the job
  std::atomic<uint64_t> delays{0}, parts{0};
  std::atomic<uint64_t> registered{0}, copied{0};  // bodies (posted_transport.h)
};

class FaultyConnection final : public cc::Connection {
 public:
  using Clock = MemoryNetwork::Clock;
  FaultyConnection(std::unique_ptr<cc::Connection> inner, Faults& faults, int rank, int peer, uint64_t number)
      : inner_(std::move(inner)), faults_(faults), rank_(rank), peer_(peer), random_(faults.seed * 7919 + number) {}

  ptrdiff_t send(const void* bytes, size_t n) override { return send(bytes, n, nullptr, 0, 0); }
  ptrdiff_t send(const void* head, size_t head_size, const void* body, size_t body_size, size_t sent) override {
    if (!inner_) return -1;
    const size_t n = allowed(&sends_at_, head_size + body_size - sent);
    if (n == 0) return 0;
    const bool counts = faults_.armed && faults_.until_cut >= 0;
    const int64_t left = counts ? faults_.until_cut -= static_cast<int64_t>(n) : 0;
    if (left < 0) return cut();
    if (sent + n <= head_size) return inner_->send(static_cast<const char*>(head) + sent, n);
    return inner_->send(head, head_size, body, sent + n - head_size, sent);
  }
  ptrdiff_t receive(void* bytes, size_t n) override {
    if (!inner_) return -1;
    const size_t now = visible(n);
    const ptrdiff_t got = now ? inner_->receive(bytes, now) : 0;
    if (got > 0) visible_ -= static_cast<size_t>(got);
    return got;
  }
  ptrdiff_t peek(void* bytes, size_t n) override {
    if (!inner_) return -1;
    const size_t now = visible(n);
    return now ? inner_->peek(bytes, now) : 0;
  }
  bool is_delivered() override { return !inner_ || inner_->is_delivered(); }

  cc::Connection* inner() const { return inner_.get(); }
  Clock::time_point ready_at(cc::PollEvent event) const {
    return event == cc::PollEvent::send ? sends_at_ : receives_at_;
  }

 private:
  size_t below(size_t limit) { return std::uniform_int_distribution<size_t>(0, limit - 1)(random_); }
  size_t allowed(Clock::time_point* at, size_t n) {
    const auto now = Clock::now();
    if (now < *at || n == 0) return 0;
    const size_t dice = below(32);
    if (dice == 0) {
      ++faults_.delays;
      *at = now + std::chrono::microseconds(below(2000));
      return 0;
    }
    if (dice > 6) return n;
    ++faults_.parts;
    return 1 + below(std::min(n, size_t(300)));
  }
  // What has been seen once stays there.
  size_t visible(size_t n) {
    visible_ = std::max(visible_, allowed(&receives_at_, n));
    return std::min(visible_, n);
  }
  ptrdiff_t cut() {
    int none = -1;
    if (!faults_.cut_to.compare_exchange_strong(none, peer_)) return 0;  // another one is
    faults_.cut_from = rank_;
    inner_.reset();
    faults_.until_cut = -1;
    return -1;
  }

  std::unique_ptr<cc::Connection> inner_;
  Faults& faults_;
  const int rank_, peer_;
  std::mt19937_64 random_;
  Clock::time_point sends_at_{}, receives_at_{};
  size_t visible_ = 0;
};

class FaultyTransport final : public MemoryTransport {
 public:
  FaultyTransport(MemoryNetwork& network, Faults& faults) : MemoryTransport(network), faults_(faults) {}

  bool poll(std::vector<cc::PollEntry>& entries, int milliseconds) override {
    const auto end = FaultyConnection::Clock::now() + std::chrono::milliseconds(milliseconds);
    for (;;) {
      const auto now = FaultyConnection::Clock::now();
      auto wake = end;
      bool any = false;
      std::vector<cc::PollEntry> inner;
      for (cc::PollEntry& entry : entries) {
        const auto* connection = static_cast<const FaultyConnection*>(entry.endpoint);
        entry.ready = connection && !connection->inner();
        any = any || entry.ready;
        const bool waits = connection && connection->ready_at(entry.event) > now;
        if (waits) wake = std::min(wake, connection->ready_at(entry.event));
        inner.push_back({connection && !waits ? connection->inner() : nullptr, entry.event});
      }
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(wake - now).count();
      any = MemoryTransport::poll(inner, any || left < 0 ? 0 : static_cast<int>(left) + (wake < end ? 1 : 0)) || any;
      for (size_t i = 0; i < entries.size(); ++i) entries[i].ready = entries[i].ready || inner[i].ready;
      if (any || FaultyConnection::Clock::now() >= end) return any;
    }
  }

 private:
  void add_connection(cc::Connections* connections, const cc::Topology& topology, const cc::PlannedConnection& planned,
                      bool outgoing, std::unique_ptr<cc::Connection> connection) override {
    const int rank = topology.peers[topology.rank].global_rank, peer = topology.peers[planned.peer].global_rank;
    const uint64_t number = static_cast<uint64_t>(rank) * 1000 + ++connections_;
    connections->add(planned, outgoing,
                     std::make_unique<FaultyConnection>(std::move(connection), faults_, rank, peer, number));
  }
  Faults& faults_;
  uint64_t connections_ = 0;
};
