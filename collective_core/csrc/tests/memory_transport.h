// A transport without sockets, for tests: ranks are threads of one process, and a connection is two queues. It shows
// what a transport must do, and that the engine needs no more of one.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>
#include <vector>

#include "transport/seam.h"

// All connections of a job.
class MemoryNetwork {
 public:
  // Fills up like a socket's buffer, so that senders must wait.
  struct Queue {
    static constexpr size_t capacity = size_t(100) << 10;
    std::vector<char> bytes = std::vector<char>(capacity);  // a ring
    size_t begin = 0, size = 0;

    size_t push(const char* from, size_t n) {
      n = std::min(n, capacity - size);
      for (size_t done = 0; done < n;) {
        const size_t at = (begin + size) % capacity, part = std::min(n - done, capacity - at);
        std::memcpy(bytes.data() + at, from + done, part);
        size += part;
        done += part;
      }
      return n;
    }
    size_t copy(char* to, size_t n) const {
      n = std::min(n, size);
      for (size_t done = 0; done < n;) {
        const size_t at = (begin + done) % capacity, part = std::min(n - done, capacity - at);
        std::memcpy(to + done, bytes.data() + at, part);
        done += part;
      }
      return n;
    }
    void drop(size_t n) {
      begin = (begin + n) % capacity;
      size -= n;
    }
  };
  struct Link {
    std::array<Queue, 2> queues;   // from the caller, and back
    std::array<bool, 2> closed{};  // by the caller, by the other
    std::array<cc::Fd, 2> fds;     // of a local connection
  };
  using Key = std::tuple<int, int, cc::Purpose, int>;  // caller, called, purpose, channel

  // Whoever comes first makes it.
  std::shared_ptr<Link> link(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<Link>& found = links_[key];
    if (found) return found;
    found = std::make_shared<Link>();
    int ends[2];
    if (std::get<cc::Purpose>(key) == cc::Purpose::local) {
      if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0)
        throw cc::Failure(cc::Fault::internal, cc::system_error("socketpair"));
      found->fds = {cc::Fd(ends[0]), cc::Fd(ends[1])};
    }
    return found;
  }

  using Clock = std::chrono::steady_clock;
  std::chrono::milliseconds slowness{0};      // between two parts of what is long
  Clock::duration longest_pause{0};           // between two times that bytes were received
  Clock::time_point received = Clock::now();  // the latest
  uint64_t sent = 0;                          // bytes
  std::mutex mutex;                           // of all links
  std::condition_variable changed;            // something was sent, received or closed

 private:
  std::map<Key, std::shared_ptr<Link>> links_;
};

class MemoryConnection final : public cc::Connection {
 public:
  MemoryConnection(MemoryNetwork& network, std::shared_ptr<MemoryNetwork::Link> link, bool called)
      : network_(network), link_(std::move(link)), me_(called ? 1 : 0) {}
  ~MemoryConnection() override {
    const std::lock_guard<std::mutex> lock(network_.mutex);
    link_->closed[me_] = true;
    network_.changed.notify_all();
  }

  ptrdiff_t send(const void* bytes, size_t n) override { return send(bytes, n, nullptr, 0, 0); }
  ptrdiff_t send(const void* head, size_t head_size, const void* body, size_t body_size, size_t sent) override {
    const std::lock_guard<std::mutex> lock(network_.mutex);
    if (link_->closed[1 - me_]) return -1;
    MemoryNetwork::Queue& queue = link_->queues[me_];
    size_t done = 0;
    if (sent < head_size) done = queue.push(static_cast<const char*>(head) + sent, head_size - sent);
    const size_t body_sent = sent + done - std::min(sent + done, head_size);
    if (sent + done >= head_size && body_sent < body_size)
      done += queue.push(static_cast<const char*>(body) + body_sent, body_size - body_sent);
    network_.sent += done;
    if (done) network_.changed.notify_all();
    return static_cast<ptrdiff_t>(done);
  }
  ptrdiff_t receive(void* bytes, size_t n) override {
    const std::lock_guard<std::mutex> lock(network_.mutex);
    MemoryNetwork::Queue& queue = link_->queues[1 - me_];
    const auto now = MemoryNetwork::Clock::now();
    if (network_.slowness.count() > 0 && n > max_when_slow) {
      if (now < slept_until_) return 0;
      slept_until_ = now + network_.slowness;
      n = max_when_slow;
    }
    const size_t got = queue.copy(static_cast<char*>(bytes), n);
    queue.drop(got);
    if (got) {
      network_.longest_pause = std::max(network_.longest_pause, now - network_.received);
      network_.received = now;
      network_.changed.notify_all();
    }
    return got == 0 && link_->closed[1 - me_] ? -1 : static_cast<ptrdiff_t>(got);
  }
  ptrdiff_t peek(void* bytes, size_t n) override {
    const std::lock_guard<std::mutex> lock(network_.mutex);
    const size_t got = link_->queues[1 - me_].copy(static_cast<char*>(bytes), n);
    return got == 0 && link_->closed[1 - me_] ? -1 : static_cast<ptrdiff_t>(got);
  }
  bool is_delivered() override {  // what the peer will read is in its memory as soon as it is sent
    return true;
  }
  // With the network's mutex held.
  bool is_ready(cc::PollEvent event) const {
    const MemoryNetwork::Queue& queue = link_->queues[event == cc::PollEvent::send ? me_ : 1 - me_];
    const bool moves = event == cc::PollEvent::send ? queue.size < queue.capacity : queue.size > 0;
    return moves || link_->closed[1 - me_];
  }

 private:
  static constexpr size_t max_when_slow = 4096;
  MemoryNetwork& network_;
  const std::shared_ptr<MemoryNetwork::Link> link_;
  const size_t me_;
  MemoryNetwork::Clock::time_point slept_until_{};
};

// One rank's end of it.
class MemoryTransport : public cc::Transport {
 public:
  explicit MemoryTransport(MemoryNetwork& network) : network_(network) {}

  cc::Connections connect(const cc::Topology& topology, int sockets, double /*seconds*/) override {
    const cc::ConnectionPlan plan = cc::plan_connections(topology, sockets);
    cc::Connections connections;
    const auto add = [&](const cc::PlannedConnection& planned, bool outgoing) {
      const int caller = outgoing ? topology.rank : planned.peer, called = outgoing ? planned.peer : topology.rank;
      auto link = network_.link({caller, called, planned.purpose, planned.channel});
      if (planned.purpose == cc::Purpose::local) {
        connections.local[planned.peer] = std::move(link->fds[outgoing ? 0 : 1]);
      } else {
        auto connection = std::make_unique<MemoryConnection>(network_, std::move(link), !outgoing);
        add_connection(&connections, topology, planned, outgoing, std::move(connection));
      }
    };
    for (const cc::PlannedConnection& planned : plan.outgoing) add(planned, true);
    for (const cc::PlannedConnection& planned : plan.incoming) add(planned, false);
    return connections;
  }

  bool poll(std::vector<cc::PollEntry>& entries, int milliseconds) override {
    std::unique_lock<std::mutex> lock(network_.mutex);
    return network_.changed.wait_for(lock, std::chrono::milliseconds(milliseconds), [&] {
      bool any = false;
      for (cc::PollEntry& entry : entries) {
        entry.ready = entry.endpoint && is_ready(*entry.endpoint, entry.event);
        any = any || entry.ready;
      }
      return any;
    });
  }

 protected:
  virtual void add_connection(cc::Connections* connections, const cc::Topology& /*topology*/,
                              const cc::PlannedConnection& planned, bool outgoing,
                              std::unique_ptr<cc::Connection> connection) {
    connections->add(planned, outgoing, std::move(connection));
  }
  // With the network's mutex held.
  virtual bool is_ready(const cc::Endpoint& endpoint, cc::PollEvent event) {
    return static_cast<const MemoryConnection&>(endpoint).is_ready(event);
  }
  MemoryNetwork& network_;
};
