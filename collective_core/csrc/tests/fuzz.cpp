// Sends the engine what nobody should: strangers' bytes to a listener, and a broken rank's frames to a running job.
// Meant for the sanitizers; built with COLLECTIVE_SELFTEST (selftest.cpp says how). Every case follows from its number,
// so one that fails can be run again alone: collective_core_fuzz [first case] [number of cases]
// Or an honest program on a network that misbehaves (random_program.h): collective_core_fuzz faults [seconds] [first
// seed]; with 0 seconds one seed.
//
// A case may end in any failure, as the job would, but never in a crash, a hang or a stranger who is let in; and one
// whose bytes were left as they are must succeed, or the others would show nothing.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"
#include "negotiation/dissemination.h"
#include "negotiation/header_codec.h"
#include "tests/random_program.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/tcp_transport.h"

namespace {

using Random = std::mt19937_64;

constexpr int cases_by_default = 600;
constexpr int at_once = 16;  // they mostly wait
constexpr double timeout_s = 1.0;
constexpr double start_s = 20.0;

std::atomic<int> failures{0}, honest{0}, refused{0};

void fail(int number, const std::string& what) {
  std::printf("case %d: %s\n", number, what.c_str());
  ++failures;
}

std::string secret() {
  return std::string(32, 's');
}

size_t below(Random& random, size_t limit) {
  return std::uniform_int_distribution<size_t>(0, limit - 1)(random);
}

// Values at which comparisons and products go wrong.
uint64_t odd_number(Random& random) {
  static const uint64_t odd[] = {0,
                                 1,
                                 0x7F,
                                 0x80,
                                 0xFF,
                                 0xFFFF,
                                 0x7FFFFFFF,
                                 0x80000000,
                                 0xFFFFFFFF,
                                 uint64_t(1) << 32,
                                 uint64_t(1) << 48,
                                 ~uint64_t(0) >> 1,
                                 ~uint64_t(0)};
  const size_t i = below(random, std::size(odd) + 1);
  return i < std::size(odd) ? odd[i] : random();
}

// Overwrites numbers of different widths, flips bits, cuts off or appends.
void spoil(std::string* bytes, Random& random) {
  for (size_t times = 1 + below(random, 4); times-- > 0 && !bytes->empty();) {
    const size_t width = std::min(size_t(1) << below(random, 4), bytes->size());
    const size_t at = below(random, bytes->size() - width + 1);
    switch (below(random, 8)) {
      case 0:
        bytes->resize(below(random, bytes->size() + 1));
        break;
      case 1:
        for (size_t more = below(random, 300); more-- > 0;) bytes->push_back(static_cast<char>(random()));
        break;
      case 2:
        (*bytes)[at] = static_cast<char>((*bytes)[at] ^ (1 << below(random, 8)));
        break;
      default: {
        const uint64_t number = odd_number(random);
        std::memcpy(&(*bytes)[at], &number, width);
      }
    }
  }
}

template <class T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// ---------------------------------------------------------------------------------- a stranger at a listener

void connect_as_stranger(int number) {
  Random random(static_cast<uint64_t>(number));
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) return fail(number, "no sockets");
  const cc::Fd stranger(ends[0]);
  cc::PendingConnection pending(cc::Fd(ends[1]), below(random, 2) == 0);

  std::string said = bytes_of(cc::make_hello(1, 0, cc::Purpose::data, 0));
  std::string proof(sizeof(cc::Digest), '\0');
  for (char& byte : proof) byte = static_cast<char>(random());
  said += proof;
  if (below(random, 3) > 0) spoil(&said, random);
  auto state = cc::PendingConnection::State::waiting;
  for (size_t at = 0; at < said.size() && state == cc::PendingConnection::State::waiting;) {
    const size_t piece = 1 + below(random, said.size() - at);
    if (cc::send_some(stranger.get(), said.data() + at, piece) < static_cast<ptrdiff_t>(piece)) break;
    at += piece;
    state = pending.advance(secret(), 0);
  }
  if (state == cc::PendingConnection::State::accepted) fail(number, "a stranger was let in");
  if (state == cc::PendingConnection::State::refused) ++refused;
}

// ------------------------------------------------------------------------------- the encoded headers of many ranks

// A header with room for a payload behind it, as in a slot.
struct Slot {
  static constexpr size_t max_payload = 256;
  cc::Header header;
  char payload[max_payload];
};

Slot slot_of(Random& random, uint32_t sequence) {
  Slot slot{};
  slot.header.kind = cc::Kind::allreduce;
  slot.header.dtype = cc::DType::f32;
  slot.header.sequence = sequence;
  slot.header.ndim = 1;
  slot.header.count = 1 + below(random, 3);  // often that of the rank before
  slot.header.dims[0] = static_cast<int64_t>(slot.header.count);
  slot.header.inline_bytes = static_cast<uint32_t>(below(random, 2) * slot.header.bytes());
  std::memset(slot.payload, static_cast<int>(below(random, 2)), slot.header.inline_bytes);
  return slot;
}

// What was written is read again; what was spoilt is refused, or read as something that could have been asked for.
void decode_spoilt_headers(int number) {
  Random random(static_cast<uint64_t>(number));
  const size_t ranks = 1 + below(random, 40);
  const uint32_t sequence = static_cast<uint32_t>(random());
  std::vector<Slot> said, heard(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) said.push_back(slot_of(random, sequence));
  std::vector<const cc::Header*> from;
  std::vector<cc::Header*> to;
  for (size_t rank = 0; rank < ranks; ++rank) {
    from.push_back(&said[rank].header);
    to.push_back(&heard[rank].header);
  }
  std::vector<char> encoded;
  cc::encode_headers(from, &encoded);
  const int size = static_cast<int>(ranks);
  if (encoded.size() > cc::max_encoded_bytes(ranks, Slot::max_payload))
    fail(number, "encoded headers are longer than any can be");
  std::vector<size_t> leads;
  if (!cc::decode_headers(encoded, sequence, size, Slot::max_payload, to, &leads))
    return fail(number, "encoded headers were not understood");
  for (size_t rank = 0; rank < ranks; ++rank) {
    const Slot &theirs = said[rank], &read = heard[leads[rank]];
    if (std::memcmp(&theirs, &read, sizeof theirs.header + theirs.header.inline_bytes) != 0)
      fail(number, "encoded headers were read wrongly");
  }

  std::string spoilt(encoded.begin(), encoded.end());
  spoil(&spoilt, random);
  const std::vector<char> bytes(spoilt.begin(), spoilt.end());
  if (!cc::decode_headers(bytes, sequence, size, Slot::max_payload, to, &leads)) return;
  for (const size_t lead : leads) {
    const Slot& slot = heard[lead];
    if (slot.header.inline_bytes > Slot::max_payload || slot.header.kind >= cc::Kind::count)
      fail(number, "spoilt headers were taken for valid");
  }
}

// ------------------------------------------------------------------------------- a broken rank in a running job

struct Request {
  cc::Kind kind;
  uint64_t count;
};

std::shared_ptr<cc::Task> task_of(const Request& request, const void* in, void* out, int size) {
  auto task = std::make_shared<cc::Task>();
  cc::Header& header = task->operation.header;
  header.kind = request.kind;
  header.dtype = cc::DType::f32;
  header.reduce = cc::ReduceOp::sum;
  header.ndim = 1;
  header.count = request.count;
  header.dims[0] = static_cast<int64_t>(request.count);
  header.root = 1;
  header.prescale = header.postscale = 1.0;
  header.name_hash = cc::hash_of("fuzz");
  std::snprintf(header.name, sizeof header.name, "fuzz");
  task->operation.input = in;
  task->operation.output = out;
  task->operation.splits.assign(static_cast<size_t>(size), 0);
  task->operation.splits[0] = static_cast<int64_t>(request.count / 2);
  task->operation.splits[1] = static_cast<int64_t>(request.count - request.count / 2);
  return task;
}

std::string encoded_frame_of(const Request& request, uint32_t sequence, const std::vector<float>& data) {
  const auto task = task_of(request, nullptr, nullptr, 2);
  cc::Header header = task->operation.header;
  header.sequence = sequence;
  std::string payload;
  if (request.kind == cc::Kind::alltoall) {
    for (const int64_t rows : task->operation.splits) payload += bytes_of(rows);
  } else if (header.bytes() <= 1024) {
    payload.assign(reinterpret_cast<const char*>(data.data()), header.bytes());
  }
  header.inline_bytes = static_cast<uint32_t>(payload.size());
  const cc::HeaderRun run{1};
  const cc::Frame frame{cc::FrameType::headers, sequence, sizeof run + sizeof header + payload.size()};
  return bytes_of(frame) + bytes_of(run) + bytes_of(header) + payload;
}

std::string announcement(Random& random) {
  std::string news(2 * sizeof(int32_t) + cc::max_blamed * sizeof(int32_t) + cc::failure_text, '\0');
  for (char& byte : news) byte = static_cast<char>(random());
  const cc::Frame frame{cc::FrameType::failure, 0, news.size()};
  return bytes_of(frame) + news;
}

// Rank 1, which has proven itself and then sends what it likes to the others.
void be_broken(const std::vector<cc::Peer>& peers, cc::Listeners listeners, const Request& request, bool as_it_is,
               Random random) {
  cc::TcpTransport transport(std::move(listeners), secret());
  const cc::Connections connections = transport.connect(cc::make_topology(1, peers), 1, start_s);
  const std::vector<float> data(request.count, 2.0F);
  for (const auto& entry : connections.control) {
    std::string said = encoded_frame_of(request, 1, data);
    if (!as_it_is) {
      if (below(random, 8) == 0) said = announcement(random);
      if (below(random, 8) == 0) said.insert(0, bytes_of(cc::Frame{cc::FrameType::waiting, 1, 0}));
      if (below(random, 8) == 0) said += announcement(random);
      if (below(random, 16) > 0) spoil(&said, random);
    }
    entry.second->send(said.data(), said.size());
  }
  if (!as_it_is) {
    std::string noise(below(random, 4096), '\0');
    for (char& byte : noise) byte = static_cast<char>(random());
    cc::Endpoint& raw = connections.to.begin()->second[0]->endpoint();
    static_cast<cc::Connection&>(raw).send(noise.data(), noise.size());
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(as_it_is ? 500 : below(random, 30)));
}

// One of the others.
void meet_it(int number, const std::vector<cc::Peer>& peers, int rank, cc::Listeners listeners, const Request& request,
             bool must_succeed) {
  try {
    auto transport = std::make_unique<cc::TcpTransport>(std::move(listeners), secret());
    auto group = std::make_unique<cc::Group>(cc::make_topology(rank, peers), std::move(transport), timeout_s, start_s);
    cc::Engine engine(std::move(group));
    const std::vector<float> in(request.count, 1.0F);
    std::vector<float> out(request.count * peers.size());  // what an allgather of as much from each rank needs
    const auto task = task_of(request, in.data(), out.data(), static_cast<int>(peers.size()));
    engine.run(task);
    for (const int blamed : task->ranks) {
      if (blamed < 0 || blamed >= static_cast<int>(peers.size()))
        fail(number, "rank " + std::to_string(blamed) + " is blamed");
    }
    const auto end = out.begin() + static_cast<std::ptrdiff_t>(request.count);
    const bool right = task->error.empty() && std::all_of(out.begin(), end, [](float x) { return x == 3.0F; });
    if (must_succeed && !right) fail(number, "an honest rank was not understood: " + task->error);
    if (must_succeed && right) ++honest;
  } catch (const std::exception& error) {
    fail(number, error.what());
  }
}

void meet_broken_rank(int number) {
  Random random(static_cast<uint64_t>(number));
  static const cc::Kind kinds[] = {cc::Kind::allreduce, cc::Kind::allgather,     cc::Kind::broadcast, cc::Kind::barrier,
                                   cc::Kind::alltoall,  cc::Kind::reducescatter, cc::Kind::join};
  static const uint64_t counts[] = {1, 5, 200, 5000, 1000000};
  const bool as_it_is = number % 10 == 0;
  const int size = number % 20 == 1 ? cc::max_direct_hosts + 1 : 2;  // with several steps, now and then
  Request request{kinds[below(random, std::size(kinds))], counts[below(random, std::size(counts))]};
  if (as_it_is) request = {cc::Kind::allreduce, 200};
  if (!cc::has_tensor(request.kind)) request.count = 0;

  std::vector<cc::Listeners> listeners;
  std::vector<cc::Peer> peers;
  for (int r = 0; r < size; ++r) {
    listeners.push_back(cc::open_listeners({"127.0.0.1"}));
    cc::Peer peer;
    peer.rank = peer.global_rank = r;
    peer.pid = getpid();
    peer.host_id = peer.host_name = "host" + std::to_string(r);
    peer.address = "127.0.0.1";
    peer.port = listeners.back().port;
    peer.socket_name = listeners.back().socket_name;
    peers.push_back(peer);
  }
  std::vector<std::thread> ranks;
  ranks.emplace_back([&, copy = random] {
    try {
      be_broken(peers, std::move(listeners[1]), request, as_it_is, copy);
    } catch (const std::exception& error) {
      fail(number, std::string("the broken rank could not begin: ") + error.what());
    }
  });
  for (int r = 0; r < size; ++r) {
    if (r == 1) continue;
    ranks.emplace_back([&, r] { meet_it(number, peers, r, std::move(listeners[r]), request, as_it_is); });
  }
  for (std::thread& rank : ranks) rank.join();
}

int number_of(const char* word) {
  return static_cast<int>(std::strtol(word, nullptr, 10));
}

}  // namespace

int main(int arguments, char** words) {
  if (arguments > 1 && std::string(words[1]) == "faults") {
    const double seconds = arguments > 2 ? std::strtod(words[2], nullptr) : 60;
    return random_program::run_for(seconds, arguments > 3 ? std::strtoull(words[3], nullptr, 10) : 0) ? 1 : 0;
  }
  const int first = arguments > 1 ? number_of(words[1]) : 0;
  const int cases = arguments > 2 ? number_of(words[2]) : cases_by_default;
  std::atomic<int> next{first};
  std::vector<std::thread> threads;
  threads.reserve(at_once);
  for (int i = 0; i < std::min(at_once, cases); ++i) {
    threads.emplace_back([&] {
      for (int number = next++; number < first + cases; number = next++) {
        for (int times = 0; times < 50; ++times) connect_as_stranger(number * 50 + times);
        for (int times = 0; times < 50; ++times) decode_spoilt_headers(number * 50 + times);
        meet_broken_rank(number);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (cases >= 10 && (honest == 0 || refused == 0))
    fail(first, "no honest rank was understood, or no stranger refused");
  std::printf("fuzz: %d cases, %d failures, %d honest ranks understood, %d strangers refused\n", cases, failures.load(),
              honest.load(), refused.load());
  return failures ? 1 : 0;
}
