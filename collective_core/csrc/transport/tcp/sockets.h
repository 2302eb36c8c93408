// Sockets with an owner and a deadline. Every socket is non-blocking and closed on exec; every wait ends.
#pragma once

#include <cstddef>
#include <string>

#include "base/deadline.h"
#include "base/errors.h"
#include "base/fd.h"

namespace cc {

// Listens on `address` (numeric) at this port; 0: one that the system chooses.
Fd listen_tcp(const std::string& address, int* port);
// Listens on an abstract unix socket: it has no file, so nothing is left behind. `name` receives a random name.
Fd listen_unix(std::string* name);
// Seconds that a refused connection is retried before it is believed: whoever is called may be about to listen.
constexpr double refused_retry_s = 3.0;
Fd connect_tcp(const std::string& address, int port, const Deadline& deadline, double retry_s = refused_retry_s);
Fd connect_unix(const std::string& name, const Deadline& deadline, double retry_s = refused_retry_s);
// An invalid Fd when nobody is waiting.
Fd accept_now(int listener);

// For connections between ranks: no delay for small messages; a host that vanished is noticed without traffic.
void tune_peer_socket(int fd);
// True when the process at the other end of a unix socket runs under our user.
bool same_user(int unix_fd);

// The other side closed the connection.
class HungUp : public Failure {
 public:
  HungUp() : Failure(Fault::peer_lost, "the connection was closed") {}
};

// Throw Failure(timeout) after the deadline, HungUp at end of file or error.
void send_exactly(int fd, const void* bytes, size_t n, const Deadline& deadline);
void receive_exactly(int fd, void* bytes, size_t n, const Deadline& deadline);

// Moves what can be moved now. Returns the number of bytes, 0 when the socket is not ready, -1 when the peer is gone.
// SIGPIPE is never raised.
ptrdiff_t send_some(int fd, const void* bytes, size_t n);
// Sends what is left of `head` followed by `body`, of which `sent` bytes in all have gone, in one packet if possible: a
// head on its own would wake the receiver twice.
ptrdiff_t send_some(int fd, const void* head, size_t head_size, const void* body, size_t body_size, size_t sent);
ptrdiff_t receive_some(int fd, void* bytes, size_t n, bool peek = false);

std::string random_bytes(size_t n);

}  // namespace cc
