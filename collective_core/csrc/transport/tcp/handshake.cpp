#include "transport/tcp/handshake.h"

#include <cstring>
#include <utility>

#include "base/errors.h"

namespace cc {
namespace {

constexpr char magic[8] = {'c', 'o', 'l', 'l', 'c', 'o', 'r', 'e'};
constexpr size_t nonce_bytes = 32;
constexpr size_t proof_bytes = sizeof(Digest);
constexpr char admitted = '!';
constexpr double handshake_timeout_s = 5.0;  // seconds that an unproven connection may take

std::string bytes_of(const Hello& hello) {
  return {reinterpret_cast<const char*>(&hello), sizeof hello};
}

}  // namespace

Hello make_hello(int from, int to, Purpose purpose, int channel) {
  Hello hello{};
  std::memcpy(hello.magic, magic, sizeof magic);
  hello.version = protocol_version;
  hello.from = from;
  hello.to = to;
  hello.channel = channel;
  hello.purpose = purpose;
  std::memcpy(hello.nonce, random_bytes(nonce_bytes).data(), nonce_bytes);
  return hello;
}

void authenticate(int fd, const std::string& secret, int from, int to, Purpose purpose, int channel,
                  const Deadline& deadline) {
  const Hello hello = make_hello(from, to, purpose, channel);
  send_exactly(fd, &hello, sizeof hello, deadline);

  std::string nonce(nonce_bytes, '\0');
  Digest proof{};
  receive_exactly(fd, &nonce[0], nonce_bytes, deadline);
  receive_exactly(fd, proof.data(), proof.size(), deadline);
  if (!equal_constant_time(proof, hmac_sha256(secret, "listener" + bytes_of(hello) + nonce))) {
    throw Failure(Fault::peer_lost, "the process that answered does not know this job's secret");
  }
  proof = hmac_sha256(secret, "connector" + bytes_of(hello) + nonce);
  send_exactly(fd, proof.data(), proof.size(), deadline);
  char answer = 0;
  receive_exactly(fd, &answer, sizeof answer, deadline);
}

PendingConnection::PendingConnection(Fd connection, bool is_local)
    : fd_(std::move(connection)), is_local_(is_local), deadline_(handshake_timeout_s) {}

bool PendingConnection::admit() {
  return send_some(fd_.get(), &admitted, sizeof admitted) == sizeof admitted;
}

PendingConnection::State PendingConnection::advance(const std::string& secret, int to) {
  for (;;) {
    const size_t wanted = replied_ ? proof_bytes : sizeof(Hello);
    char buffer[sizeof(Hello)];
    // Never more than this step's bytes: what follows the proof belongs to the connection's next owner.
    const ptrdiff_t got = receive_some(fd_.get(), buffer, wanted - received_.size());
    if (got < 0) return State::refused;
    if (got == 0) return State::waiting;
    received_.append(buffer, static_cast<size_t>(got));
    if (received_.size() < wanted) continue;
    if (replied_) {
      Digest proof{};
      std::memcpy(proof.data(), received_.data(), proof.size());
      const Digest expected = hmac_sha256(secret, "connector" + bytes_of(hello_) + nonce_);
      return equal_constant_time(proof, expected) ? State::accepted : State::refused;
    }
    std::memcpy(&hello_, received_.data(), sizeof hello_);
    received_.clear();
    if (std::memcmp(hello_.magic, magic, sizeof magic) != 0 || hello_.version != protocol_version || hello_.to != to) {
      return State::refused;
    }
    nonce_ = random_bytes(nonce_bytes);
    const Digest proof = hmac_sha256(secret, "listener" + bytes_of(hello_) + nonce_);
    const std::string reply = nonce_ + std::string(proof.begin(), proof.end());
    // 64 bytes always fit into the empty send buffer of a new connection; one that cannot take them is refused.
    if (send_some(fd_.get(), reply.data(), reply.size()) != static_cast<ptrdiff_t>(reply.size())) return State::refused;
    replied_ = true;
  }
}

}  // namespace cc
