// A network that reads and writes memory itself, as one over verbs would: a thread plays the network card. A sender
// says where a body lies; when the receiver has said where it goes, the card copies it there, some time later, and
// completes it on both sides. Of bodies in memory that was not registered every other one is copied when it is posted;
// the rest is read where it lies, as by a registration of the transport's own.
//
// Headers and failures go over the streams of memory_transport.h.
#pragma once

#include <deque>
#include <thread>

#include "tests/faulty_transport.h"

class PostedNetwork : public MemoryNetwork {
 public:
  struct Transfer {
    cc::SegmentHead head;
    const char* from;
    size_t bytes;
    std::vector<char> copy;  // of what was not registered
    char* to = nullptr;
    bool completed = false;
  };
  // Of one data connection. All under the network's mutex.
  struct Wire {
    std::deque<std::shared_ptr<Transfer>> transfers;  // the first is the one to be received
    uint64_t completed = 0;
    bool ended = false;  // by either side: the card does nothing on it any more
  };

  explicit PostedNetwork(uint64_t seed = 0) : random_(seed), card_([this] { run_card(); }) {}
  PostedNetwork(const PostedNetwork&) = delete;
  PostedNetwork& operator=(const PostedNetwork&) = delete;
  ~PostedNetwork() {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ends_ = true;
    }
    changed.notify_all();
    card_.join();
  }

  std::shared_ptr<Wire> wire(int from, int to, int channel) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Wire>& found = wires_[{from, to, channel}];
    if (!found) found = std::make_shared<Wire>();
    return found;
  }
  // From now on nothing is moved, as by a card with much to do. With the mutex held.
  void hold() { holds_ = true; }
  // How many transfers would still read or write memory of this rank (of the job).
  int in_use(int rank) {
    const std::lock_guard<std::mutex> lock(mutex);
    int used = 0;
    for (const auto& [key, wire] : wires_) {
      for (const auto& transfer : wire->transfers) {
        if (wire->ended || transfer->completed) continue;
        const bool is_read = std::get<0>(key) == rank && transfer->copy.empty();
        used += is_read || (std::get<1>(key) == rank && transfer->to) ? 1 : 0;
      }
    }
    return used;
  }

  void end(Wire& wire) {
    const std::lock_guard<std::mutex> lock(mutex);
    wire.ended = true;
    changed.notify_all();
  }
  // With the mutex held.
  void start(std::shared_ptr<Wire> wire) { started_.push_back(std::move(wire)); }
  bool is_registered(const void* begin, size_t bytes) const {
    const auto at = reinterpret_cast<uintptr_t>(begin);
    return std::any_of(registered_.begin(), registered_.end(), [&](const auto& entry) {
      return at >= entry.second.first && at + bytes <= entry.second.first + entry.second.second;
    });
  }

  std::shared_ptr<void> register_memory(void* begin, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex);
    const uint64_t number = ++registrations_;
    registered_[number] = {reinterpret_cast<uintptr_t>(begin), bytes};
    return {this, [number](PostedNetwork* network) {
              const std::lock_guard<std::mutex> at_the_end(network->mutex);
              network->registered_.erase(number);
            }};
  }

 private:
  void run_card() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return ends_ || (!started_.empty() && !holds_); });
      if (ends_) return;
      const size_t chosen = std::uniform_int_distribution<size_t>(0, started_.size() - 1)(random_);
      const std::shared_ptr<Wire> wire = started_[chosen];
      started_.erase(started_.begin() + static_cast<ptrdiff_t>(chosen));
      if (std::uniform_int_distribution<int>(0, 31)(random_) == 0) {
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        lock.lock();
      }
      if (wire->ended) continue;  // the memory may be gone
      Transfer& transfer = *wire->transfers.front();
      std::memcpy(transfer.to, transfer.from, transfer.bytes);
      transfer.completed = true;
      ++wire->completed;
      changed.notify_all();
    }
  }

  std::map<std::tuple<int, int, int>, std::shared_ptr<Wire>> wires_;
  std::map<uint64_t, std::pair<uintptr_t, size_t>> registered_;
  uint64_t registrations_ = 0;
  std::deque<std::shared_ptr<Wire>> started_;
  std::mt19937_64 random_;
  bool holds_ = false, ends_ = false;
  std::thread card_;
};

// Where a connection ends by a fault: after so many bytes that are posted by anyone.
class PostedSender final : public cc::Sender {
 public:
  PostedSender(PostedNetwork& network, std::shared_ptr<PostedNetwork::Wire> wire, Faults& faults, int rank, int peer)
      : network_(network), wire_(std::move(wire)), faults_(faults), rank_(rank), peer_(peer) {}
  ~PostedSender() override { network_.end(*wire_); }

  void post(const cc::SegmentHead& head, const void* body, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(network_.mutex);
    auto transfer = std::make_shared<PostedNetwork::Transfer>();
    transfer->head = head;
    transfer->from = static_cast<const char*>(body);
    transfer->bytes = bytes;
    const bool registered = network_.is_registered(body, bytes), copied = !registered && posted_ % 2 == 0;
    faults_.registered += registered ? 1 : 0;
    faults_.copied += copied ? 1 : 0;
    if (copied) {
      transfer->copy.assign(transfer->from, transfer->from + bytes);
      transfer->from = transfer->copy.data();
    }
    ++posted_;
    const bool counts = faults_.armed && faults_.until_cut >= 0;
    if (counts) faults_.until_cut -= static_cast<int64_t>(bytes);
    int none = -1;
    if (counts && faults_.until_cut < 0 && faults_.cut_to.compare_exchange_strong(none, peer_)) {
      faults_.cut_from = rank_;
      faults_.until_cut = -1;
      wire_->ended = true;
      network_.hold();
    }
    wire_->transfers.push_back(std::move(transfer));
    network_.changed.notify_all();
  }
  ptrdiff_t progress() override {
    const std::lock_guard<std::mutex> lock(network_.mutex);
    const uint64_t before = std::exchange(completed_, wire_->completed);
    return completed_ == before && wire_->ended ? -1 : static_cast<ptrdiff_t>(completed_ - before);
  }
  void cancel() override { network_.end(*wire_); }
  bool is_ready() const { return wire_->ended || wire_->completed > completed_; }

 private:
  PostedNetwork& network_;
  const std::shared_ptr<PostedNetwork::Wire> wire_;
  Faults& faults_;
  const int rank_, peer_;
};

class PostedReceiver final : public cc::Receiver {
 public:
  PostedReceiver(PostedNetwork& network, std::shared_ptr<PostedNetwork::Wire> wire)
      : network_(network), wire_(std::move(wire)) {}
  ~PostedReceiver() override { network_.end(*wire_); }

  const cc::SegmentHead* head() const override { return transfer_ ? &transfer_->head : nullptr; }
  void post(void* body, size_t bytes) override {
    const std::lock_guard<std::mutex> lock(network_.mutex);
    if (bytes != transfer_->bytes) throw cc::Failure(cc::Fault::internal, "a body has another size than its place");
    transfer_->to = static_cast<char*>(body);
    network_.start(wire_);
    network_.changed.notify_all();
  }
  bool is_posted() const override { return transfer_ && transfer_->to; }
  bool is_completed() const override { return completed_; }
  void next() override {
    const std::lock_guard<std::mutex> lock(network_.mutex);
    wire_->transfers.pop_front();
    transfer_.reset();
    completed_ = false;
  }
  ptrdiff_t progress() override {
    const std::lock_guard<std::mutex> lock(network_.mutex);
    if (!has_news()) return wire_->ended ? -1 : 0;
    if (transfer_) completed_ = true;
    if (!transfer_) transfer_ = wire_->transfers.front();
    return 1;
  }
  void cancel() override { network_.end(*wire_); }
  bool is_ready() const { return wire_->ended || has_news(); }

 private:
  bool has_news() const { return transfer_ ? transfer_->completed && !completed_ : !wire_->transfers.empty(); }
  PostedNetwork& network_;
  const std::shared_ptr<PostedNetwork::Wire> wire_;
  std::shared_ptr<PostedNetwork::Transfer> transfer_;  // that is being received
  bool completed_ = false;
};

class PostedTransport final : public MemoryTransport {
 public:
  PostedTransport(PostedNetwork& network, Faults& faults)
      : MemoryTransport(network), posted_(network), faults_(faults) {}

  std::shared_ptr<void> register_memory(void* begin, size_t bytes) override {
    return posted_.register_memory(begin, bytes);
  }

 private:
  void add_connection(cc::Connections* connections, const cc::Topology& topology, const cc::PlannedConnection& planned,
                      bool outgoing, std::unique_ptr<cc::Connection> connection) override {
    if (planned.purpose != cc::Purpose::data) return connections->add(planned, outgoing, std::move(connection));
    const int rank = topology.peers[topology.rank].global_rank, peer = topology.peers[planned.peer].global_rank;
    const auto wire = posted_.wire(outgoing ? rank : peer, outgoing ? peer : rank, planned.channel);
    if (!outgoing) return connections->add(planned, std::make_unique<PostedReceiver>(posted_, wire));
    connections->add(planned, std::make_unique<PostedSender>(posted_, wire, faults_, rank, peer));
  }
  bool is_ready(const cc::Endpoint& endpoint, cc::PollEvent event) override {
    if (const auto* sender = dynamic_cast<const PostedSender*>(&endpoint)) return sender->is_ready();
    if (const auto* receiver = dynamic_cast<const PostedReceiver*>(&endpoint)) return receiver->is_ready();
    return MemoryTransport::is_ready(endpoint, event);
  }

  PostedNetwork& posted_;
  Faults& faults_;
};
