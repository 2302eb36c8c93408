#include "transport/tcp/sockets.h"

#include "base/interruption.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace cc {
namespace {

constexpr int backlog = 512;          // connections that may wait while the acceptor is busy; more than ranks per host
constexpr int retry_ms = 20;          // between attempts while a listener's backlog is full
constexpr int keepalive_idle_s = 10;  // a silent peer is probed after this,
constexpr int keepalive_interval_s = 5;  // then so often,
// A probe that is not answered for so long ends the connection (Linux lets this stand for the number of probes), and so
// does data that is not acknowledged, or not taken: it must be long enough for a peer that is alive but does not read,
// such as one that is stopped in a debugger.
constexpr unsigned unacked_ms = 60000;

void throw_if_interrupted() {
  if (is_interrupted()) throw Failure(Fault::interrupted, "a signal has ended the wait");
}

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

SocketAddress parse_address(const std::string& text, int port) {
  SocketAddress address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET, text.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    v4->sin_port = htons(static_cast<uint16_t>(port));
    address.length = sizeof(sockaddr_in);
  } else if (inet_pton(AF_INET6, text.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(static_cast<uint16_t>(port));
    address.length = sizeof(sockaddr_in6);
  } else {
    throw Failure(Fault::invalid, "'" + text + "' is not a numeric IPv4 or IPv6 address");
  }
  return address;
}

SocketAddress unix_address(const std::string& name) {
  SocketAddress address;
  auto* un = reinterpret_cast<sockaddr_un*>(&address.storage);
  un->sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof un->sun_path) throw Failure(Fault::invalid, "unix socket name too long");
  std::memcpy(un->sun_path + 1, name.data(), name.size());  // the leading NUL makes it abstract
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

Fd open_socket(int family) {
  Fd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw Failure(Fault::internal, system_error("socket"));
  return fd;
}

Fd listen_on(SocketAddress address, const std::string& shown) {
  Fd fd = open_socket(address.storage.ss_family);
  if (bind(fd.get(), address.get(), address.length) != 0 || listen(fd.get(), backlog) != 0) {
    throw Failure(Fault::internal, system_error("cannot listen on " + shown));
  }
  return fd;
}

Fd connect_to(SocketAddress address, const std::string& shown, const Deadline& deadline, double seconds) {
  const Deadline retrying(seconds);
  for (;;) {
    Fd fd = open_socket(address.storage.ss_family);
    int error = connect(fd.get(), address.get(), address.length) == 0 ? 0 : errno;
    if (error == EINPROGRESS) {
      pollfd waiting{fd.get(), POLLOUT, 0};
      error = ETIMEDOUT;
      while (!deadline.passed()) {
        throw_if_interrupted();
        if (poll(&waiting, 1, retry_ms) > 0) {
          socklen_t length = sizeof error;
          getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
          break;
        }
      }
    }
    if (error == 0) return fd;
    const bool worth_retrying = error == EAGAIN || error == EINTR || (error == ECONNREFUSED && !retrying.passed());
    if (!worth_retrying || deadline.passed()) {
      errno = error;
      throw Failure(error == ETIMEDOUT || deadline.passed() ? Fault::timeout : Fault::peer_lost,
                    system_error("cannot connect to " + shown));
    }
    throw_if_interrupted();
    poll(nullptr, 0, retry_ms);
  }
}

void wait_ready(int fd, short events, const Deadline& deadline) {
  pollfd waiting{fd, events, 0};
  while (poll(&waiting, 1, retry_ms) <= 0) {
    throw_if_interrupted();
    if (deadline.passed()) throw Failure(Fault::timeout, "no answer in time");
  }
}

}  // namespace

Fd listen_tcp(const std::string& address, int* port) {
  Fd fd = listen_on(parse_address(address, *port), address);
  SocketAddress bound;
  bound.length = sizeof bound.storage;
  if (getsockname(fd.get(), bound.get(), &bound.length) != 0)
    throw Failure(Fault::internal, system_error("getsockname"));
  *port = ntohs(bound.storage.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&bound.storage)->sin6_port
                                                    : reinterpret_cast<sockaddr_in*>(&bound.storage)->sin_port);
  return fd;
}

Fd listen_unix(std::string* name) {
  static const char digits[] = "0123456789abcdef";
  *name = "collective-core-";
  for (const char c : random_bytes(16)) {
    name->push_back(digits[static_cast<unsigned char>(c) >> 4]);
    name->push_back(digits[static_cast<unsigned char>(c) & 15]);
  }
  return listen_on(unix_address(*name), "an abstract unix socket");
}

Fd connect_tcp(const std::string& address, int port, const Deadline& deadline, double retry_s) {
  return connect_to(parse_address(address, port), address + " port " + std::to_string(port), deadline, retry_s);
}

Fd connect_unix(const std::string& name, const Deadline& deadline, double retry_s) {
  return connect_to(unix_address(name), "a rank of this host", deadline, retry_s);
}

Fd accept_now(int listener) {
  return Fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

void tune_peer_socket(int fd) {
  // Failures are ignored: unix sockets have none of these options, and a socket without them still works.
  const auto set = [fd](int level, int option, auto value) {
    static_cast<void>(setsockopt(fd, level, option, &value, sizeof value));
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, keepalive_idle_s);
  set(IPPROTO_TCP, TCP_KEEPINTVL, keepalive_interval_s);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, unacked_ms);
}

bool same_user(int unix_fd) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  return getsockopt(unix_fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == geteuid();
}

ptrdiff_t send_some(int fd, const void* bytes, size_t n) {
  const ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent >= 0) return sent;
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

ptrdiff_t send_some(int fd, const void* head, size_t head_size, const void* body, size_t body_size, size_t sent) {
  if (sent >= head_size) {
    return send_some(fd, static_cast<const char*>(body) + (sent - head_size), body_size - (sent - head_size));
  }
  iovec parts[2];
  // sendmsg does not write through iov_base.
  parts[0] = {const_cast<char*>(static_cast<const char*>(head)) + sent, head_size - sent};
  parts[1] = {const_cast<void*>(body), body_size};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  const ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n >= 0) return n;
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

ptrdiff_t receive_some(int fd, void* bytes, size_t n, bool peek) {
  const ssize_t got = recv(fd, bytes, n, MSG_DONTWAIT | (peek ? MSG_PEEK : 0));
  if (got > 0) return got;
  if (got == 0) return -1;
  return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? 0 : -1;
}

void send_exactly(int fd, const void* bytes, size_t n, const Deadline& deadline) {
  const char* at = static_cast<const char*>(bytes);
  while (n > 0) {
    const ptrdiff_t sent = send_some(fd, at, n);
    if (sent < 0) throw HungUp();
    if (sent == 0) wait_ready(fd, POLLOUT, deadline);
    at += sent;
    n -= static_cast<size_t>(sent);
  }
}

void receive_exactly(int fd, void* bytes, size_t n, const Deadline& deadline) {
  char* at = static_cast<char*>(bytes);
  while (n > 0) {
    const ptrdiff_t got = receive_some(fd, at, n);
    if (got < 0) throw HungUp();
    if (got == 0) wait_ready(fd, POLLIN, deadline);
    at += got;
    n -= static_cast<size_t>(got);
  }
}

std::string random_bytes(size_t n) {
  std::string bytes(n, '\0');
  const Fd source(open("/dev/urandom", O_RDONLY | O_CLOEXEC));
  size_t done = 0;
  while (source && done < n) {
    const ssize_t got = read(source.get(), &bytes[done], n - done);
    if (got <= 0 && errno != EINTR) break;
    if (got > 0) done += static_cast<size_t>(got);
  }
  if (done < n) throw Failure(Fault::internal, system_error("cannot read /dev/urandom"));
  return bytes;
}

}  // namespace cc
