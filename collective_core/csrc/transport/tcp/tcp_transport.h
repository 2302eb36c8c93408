// The network transport over TCP sockets.
#pragma once

#include <poll.h>

#include <string>
#include <utility>
#include <vector>

#include "transport/seam.h"
#include "transport/tcp/connections.h"
#include "transport/tcp/sockets.h"

namespace cc {

class TcpConnection final : public Connection {
 public:
  explicit TcpConnection(Fd fd) : fd_(std::move(fd)) {}
  int fd() const { return fd_.get(); }

  ptrdiff_t send(const void* bytes, size_t n) override { return send_some(fd_.get(), bytes, n); }
  ptrdiff_t send(const void* head, size_t head_size, const void* body, size_t body_size, size_t sent) override {
    return send_some(fd_.get(), head, head_size, body, body_size, sent);
  }
  ptrdiff_t receive(void* bytes, size_t n) override { return receive_some(fd_.get(), bytes, n); }
  ptrdiff_t peek(void* bytes, size_t n) override { return receive_some(fd_.get(), bytes, n, true); }
  bool is_delivered() override;

 private:
  Fd fd_;
};

class TcpTransport final : public Transport {
 public:
  TcpTransport(Listeners listeners, std::string secret)
      : listeners_(std::move(listeners)), secret_(std::move(secret)) {}

  Connections connect(const Topology& topology, int sockets, double seconds) override {
    return connect_all(topology, std::move(listeners_), secret_, seconds, sockets);
  }
  bool poll(std::vector<PollEntry>& entries, int milliseconds) override;

 private:
  Listeners listeners_;
  const std::string secret_;
  std::vector<pollfd> states_;  // kept, so that a poll allocates nothing
};

}  // namespace cc
