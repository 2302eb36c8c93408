// How two ranks convince each other that they belong to the same job before anything else is read.
//
//   connector -> listener   Hello    magic, version, who calls whom and why, 32 random bytes
//   listener  -> connector  Reply    32 random bytes, HMAC(secret, "listener" | Hello | random bytes)
//   connector -> listener   Proof    HMAC(secret, "connector" | Hello | random bytes of the Reply)
//   listener  -> connector  Admission  a byte: a listener may drop any caller before, when too many strangers call
//
// Each side proves knowledge of the secret over the other's fresh random bytes, so nothing can be replayed; the two
// labels differ, so a proof cannot be reflected; the Hello is covered, so a proof for one purpose is worthless for
// another. The secret itself never travels. The connection that follows is authenticated, not encrypted.
#pragma once

#include <cstdint>
#include <string>

#include "base/deadline.h"
#include "transport/seam.h"
#include "transport/tcp/sha256.h"
#include "transport/tcp/sockets.h"

namespace cc {

constexpr uint32_t protocol_version = 6;  // raise it with every change of a wire format

struct Hello {
  char magic[8];
  uint32_t version;
  int32_t from;
  int32_t to;
  int32_t channel;
  Purpose purpose;
  uint8_t padding[7];
  uint8_t nonce[32];
};
static_assert(sizeof(Hello) == 64, "the hello is a wire format");

Hello make_hello(int from, int to, Purpose purpose, int channel);

// The connector's side, waiting. Throws Failure when the listener cannot prove itself, HungUp when it closes.
void authenticate(int fd, const std::string& secret, int from, int to, Purpose purpose, int channel,
                  const Deadline& deadline);

// The listener's side of one connection, without waiting: strangers may connect and send anything, or nothing.
class PendingConnection {
 public:
  enum class State { waiting, accepted, refused };
  PendingConnection(Fd connection, bool is_local);

  // Reads what has arrived and answers. `to` is the rank that listens.
  State advance(const std::string& secret, int to);
  // For one that was accepted and is expected; false when it has gone.
  bool admit();
  int fd() const { return fd_.get(); }
  bool expired() const { return deadline_.passed(); }
  const Hello& hello() const { return hello_; }
  bool is_local() const { return is_local_; }
  Fd take() { return std::move(fd_); }

 private:
  Fd fd_;
  bool is_local_;
  Deadline deadline_;
  std::string received_;
  bool replied_ = false;
  Hello hello_{};
  std::string nonce_;
};

}  // namespace cc
