// Drives several ranks as threads of one process, so that the sanitizers see the whole engine without Python or MPI:
//   cmake -S . -B build -DCOLLECTIVE_SELFTEST=ON -DCOLLECTIVE_ASAN=ON && cmake --build build &&
//   build/collective_core_selftest
// Each rank has its own connections and its own mapping of the shared memory, as processes have. Exit status 0: all
// well.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "algorithms/collectives.h"
#include "base/recorder.h"
#include "engine/engine.h"
#include "negotiation/dissemination.h"
#include "negotiation/header_codec.h"
#include "tests/memory_transport.h"
#include "transport/tcp/tcp_transport.h"

namespace {

using cc::DType;
using cc::Kind;
using cc::ReduceOp;

constexpr double timeout_s = 120.0;  // a sanitizer on a busy machine takes its time
int failures = 0;                    // written after the threads of a case have ended

std::shared_ptr<cc::Task> make_task(Kind kind, DType dtype, uint64_t count, const void* in, void* out, const char* name,
                                    int root = 0) {
  auto task = std::make_shared<cc::Task>();
  cc::Header& header = task->operation.header;
  header.kind = kind;
  header.dtype = dtype;
  header.reduce = ReduceOp::sum;
  header.ndim = 1;
  header.dims[0] = static_cast<int64_t>(count);
  header.count = count;
  header.root = root;
  header.prescale = header.postscale = 1.0;
  header.name_hash = cc::hash_of(name);
  std::snprintf(header.name, sizeof header.name, "%s", name);
  task->operation.input = in;
  task->operation.output = out;
  return task;
}

float value(int rank, uint64_t i) {
  return 0.1F * static_cast<float>((i * 7 + static_cast<uint64_t>(rank) * 3) % 13);
}

// Element i of the sum of the ranks from `first` on: in rank order or, `by_host`, of the hosts' sums.
float sum_of(const cc::Topology& topology, bool by_host, int first, uint64_t i) {
  std::vector<float> sums;
  for (int r = first; r < topology.size; ++r) {
    const bool goes_on = r > first && (!by_host || topology.host_of(r) == topology.host_of(r - 1));
    if (goes_on) sums.back() += value(r, i);
    if (!goes_on) sums.push_back(value(r, i));
  }
  float sum = sums[0];
  for (size_t k = 1; k < sums.size(); ++k) sum += sums[k];
  return sum;
}

// Returns what went wrong, or an empty text.
std::string run_rank(cc::Engine& engine, uint64_t count, bool by_host) {
  const int rank = engine.topology().rank;
  const int size = engine.topology().size;
  std::vector<float> mine(count), out(count, -1.0F);
  for (uint64_t i = 0; i < count; ++i) mine[i] = value(rank, i);

  auto task = make_task(Kind::allreduce, DType::f32, count, mine.data(), out.data(), "sum");
  engine.run(task);
  if (!task->error.empty()) return task->error;
  for (uint64_t i = 0; i < count; ++i) {
    if (out[i] != sum_of(engine.topology(), by_host, 0, i)) return "wrong sum at " + std::to_string(i);
  }

  auto* shared = static_cast<float*>(engine.arena()->allocate(count * sizeof(float)));
  std::copy(mine.begin(), mine.end(), shared);
  task = make_task(Kind::allreduce, DType::f32, count, shared, shared, "sum in the arena");
  engine.run(task);
  if (!task->error.empty()) return task->error;
  if (!std::equal(out.begin(), out.end(), shared)) return "wrong sum in the arena";
  engine.arena()->release(shared);

  const int root = size - 1;
  task =
      make_task(Kind::broadcast, DType::f32, count, mine.data(), rank == root ? mine.data() : out.data(), "root", root);
  engine.submit(task);
  while (!engine.wait(*task, 0.1)) continue;
  if (!task->error.empty()) return task->error;
  for (uint64_t i = 0; rank != root && i < count; ++i) {
    if (out[i] != value(root, i)) return "wrong broadcast at " + std::to_string(i);
  }

  const uint64_t rows = count / 2 + static_cast<uint64_t>(rank);
  std::vector<float> block(rows, static_cast<float>(rank));
  task = make_task(Kind::allgather, DType::f32, rows, block.data(), nullptr, "blocks");
  engine.run(task);
  if (!task->error.empty()) return task->error;
  const auto* gathered = reinterpret_cast<const float*>(task->operation.received_bytes());
  for (int r = 0; r < size; ++r) {
    for (uint64_t i = 0; i < count / 2 + static_cast<uint64_t>(r); ++i) {
      if (*gathered++ != static_cast<float>(r)) return "wrong block of rank " + std::to_string(r);
    }
  }

  // Rows dealt out; uneven parts to everyone.
  if (count > 0) {
    const cc::Rows mine_of = cc::rows_of(count, rank, size);
    std::vector<float> part(mine_of.length + 1);
    task = make_task(Kind::reducescatter, DType::f32, count, mine.data(), part.data(), "scatter");
    engine.run(task);
    if (!task->error.empty()) return task->error;
    for (uint64_t i = 0; i < mine_of.length; ++i) {
      if (part[i] != sum_of(engine.topology(), by_host, 0, mine_of.begin + i))
        return "wrong part at " + std::to_string(i);
    }
  }
  const auto split_of = [&](int from, int to) { return static_cast<int64_t>(count / 3) * ((from + to) % 2) + from; };
  uint64_t sent = 0;
  std::vector<int64_t> splits;
  for (int r = 0; r < size; ++r) {
    splits.push_back(split_of(rank, r));
    sent += static_cast<uint64_t>(splits.back());
  }
  std::vector<float> parts(sent + 1, static_cast<float>(rank));
  task = make_task(Kind::alltoall, DType::f32, sent, parts.data(), nullptr, "exchange");
  task->operation.splits = splits;
  engine.run(task);
  if (!task->error.empty()) return task->error;
  const auto* received = reinterpret_cast<const float*>(task->operation.gathered.get());
  for (int r = 0; r < size; ++r) {
    for (int64_t i = 0; i < split_of(r, rank); ++i) {
      if (*received++ != static_cast<float>(r)) return "wrong part from rank " + std::to_string(r);
    }
  }

  // Rank 0 has no more data: it takes part until the others have none.
  if (rank > 0) {
    task = make_task(Kind::allreduce, DType::f32, count, mine.data(), out.data(), "without rank 0");
    engine.run(task);
    if (!task->error.empty()) return task->error;
    for (uint64_t i = 0; i < count; ++i) {
      if (out[i] != sum_of(engine.topology(), by_host, 1, i)) return "wrong sum without rank 0 at " + std::to_string(i);
    }
  }
  task = make_task(Kind::join, DType::u8, 0, nullptr, nullptr, "join");
  engine.run(task);
  if (!task->error.empty()) return task->error;
  if (task->operation.received.at(0) < (size > 1 ? 1 : 0)) return "wrong rank joined last";

  // A disagreement, which must leave the engine usable.
  if (size > 1) {
    const uint64_t odd = count + (rank == 0 ? 1 : 0);
    std::vector<float> longer(count + 1, 0.0F);
    task = make_task(Kind::allreduce, DType::f32, odd, longer.data(), longer.data(), "odd");
    engine.run(task);
    if (task->fault != cc::Fault::mismatch) return "a disagreement was not noticed";
  }
  return {};
}

int log2_of(int n) {  // rounded up
  int power = 0;
  while ((1 << power) < n) ++power;
  return power;
}

// Every plan, played through: nobody sends what it has not heard, what is sent is what is awaited, all end up knowing
// all.
std::string check_dissemination(int hosts) {
  std::vector<std::vector<cc::DisseminationStep>> plans;
  std::vector<std::vector<bool>> knows(static_cast<size_t>(hosts), std::vector<bool>(static_cast<size_t>(hosts)));
  for (int host = 0; host < hosts; ++host) {
    plans.push_back(cc::plan_dissemination(host, hosts));
    knows[host][host] = true;
  }
  const int steps = static_cast<int>(plans[0].size());
  if (steps > std::max(1, log2_of(hosts))) return std::to_string(steps) + " steps";
  for (int number = 0; number < steps; ++number) {
    auto after = knows;
    for (int host = 0; host < hosts; ++host) {
      const cc::DisseminationStep& step = plans[host][number];
      for (int i = 0; i < step.sends.count; ++i) {
        if (!knows[host][(step.sends.first + i) % hosts]) return "a host tells what it has not heard";
      }
      if (hosts > cc::max_direct_hosts && step.to.size() + step.from.size() != 2) return "too many messages";
      for (const cc::FromHost& from : step.from) {
        const cc::DisseminationStep& theirs = plans[from.host][number];
        const bool sent = std::find(theirs.to.begin(), theirs.to.end(), host) != theirs.to.end();
        if (!sent || theirs.sends.first != from.hosts.first || theirs.sends.count != from.hosts.count)
          return "a host awaits what nobody sends";
        for (int i = 0; i < from.hosts.count; ++i) after[host][(from.hosts.first + i) % hosts] = true;
      }
    }
    knows = after;
  }
  for (const auto& known : knows) {
    if (std::find(known.begin(), known.end(), false) != known.end()) return "a host does not learn all";
  }
  return {};
}

// More than one part of the table that a forked child closes; every one is closed in the end.
std::string check_descriptors() {
  constexpr int many = 9000;
  cc::allow_descriptors(many);
  std::vector<cc::Fd> open_ones;
  open_ones.reserve(many);
  for (int i = 0; i < many; ++i) open_ones.emplace_back(dup(0));
  const int last = open_ones.back().get();
  if (last < many) return "the limit was not raised: only so many descriptors as " + std::to_string(last);
  open_ones.clear();
  return fcntl(last, F_GETFD) == -1 ? "" : "a descriptor was left open";
}

// An operation that lasts while others come round to its slot.
std::string check_long_operation() {
  cc::Recorder recorder;
  const auto task = make_task(Kind::barrier, DType::u8, 0, nullptr, nullptr, "long");
  const auto other = make_task(Kind::barrier, DType::u8, 0, nullptr, nullptr, "other");
  cc::Event& event = recorder.begin(task->operation.header, 0, 0, 0);
  for (uint64_t i = 0; i < 2 * cc::max_events; ++i) recorder.begin(other->operation.header, 1, 0, 0).end(true);
  event.agree();
  event.end(true);
  if (event.number != 1 || std::string(event.name) != "long") return "it lost its slot";
  std::vector<char> copy(sizeof(cc::Event));
  if (recorder.copy(cc::max_events + 1, copy.data()) == cc::Recorder::Copied::done) return "it is taken for another";
  return {};
}

int open_sockets() {
  int count = 0;
  char target[64];
  for (int fd = 0; fd < 1024; ++fd) {
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    const ssize_t n = readlink(path.c_str(), target, sizeof target);
    if (n > 0 && std::string(target, static_cast<size_t>(n)).rfind("socket:", 0) == 0) ++count;
  }
  return count;
}

// What connects the ranks of a case. Several hosts are pretended, on this one.
class Network {
 public:
  virtual ~Network() = default;
  virtual std::unique_ptr<cc::Transport> transport(int rank) = 0;
  virtual void describe(cc::Peer* peer) const = 0;
};

class TcpNetwork : public Network {
 public:
  explicit TcpNetwork(int size) {
    for (int r = 0; r < size; ++r) listeners_.push_back(cc::open_listeners({"127.0.0.1"}));
  }
  std::unique_ptr<cc::Transport> transport(int rank) override {
    return std::make_unique<cc::TcpTransport>(std::move(listeners_[rank]), std::string(32, 's'));
  }
  void describe(cc::Peer* peer) const override {
    peer->address = "127.0.0.1";
    peer->port = listeners_[peer->rank].port;
    peer->socket_name = listeners_[peer->rank].socket_name;
  }

 private:
  std::vector<cc::Listeners> listeners_;
};

class NetworkInMemory : public Network {
 public:
  std::unique_ptr<cc::Transport> transport(int /*rank*/) override { return std::make_unique<MemoryTransport>(memory_); }
  void describe(cc::Peer* /*peer*/) const override {}
  MemoryNetwork& memory() { return memory_; }
  uint64_t sent() {  // bytes between hosts so far
    const std::lock_guard<std::mutex> lock(memory_.mutex);
    return memory_.sent;
  }
  void be_slow(std::chrono::milliseconds slowness) { memory_.slowness = slowness; }
  // Seconds in which nothing was received, until now.
  double longest_pause() {
    const std::lock_guard<std::mutex> lock(memory_.mutex);
    const auto pause = std::max(memory_.longest_pause, MemoryNetwork::Clock::now() - memory_.received);
    return std::chrono::duration<double>(pause).count();
  }

 private:
  MemoryNetwork memory_;
};

std::vector<cc::Peer> peers_of(const Network& network, int size, int hosts) {
  std::vector<cc::Peer> peers;
  for (int r = 0; r < size; ++r) {
    cc::Peer peer;
    peer.rank = peer.global_rank = r;
    peer.pid = getpid();
    peer.host_id = "host" + std::to_string(r * hosts / size);
    peer.host_name = peer.host_id;
    network.describe(&peer);
    peers.push_back(peer);
  }
  return peers;
}

// A host whose connections end without a goodbye is noticed, whatever the transport.
std::string check_lost_host() {
  NetworkInMemory network;
  const std::vector<cc::Peer> peers = peers_of(network, 3, 3);
  std::vector<std::shared_ptr<cc::Task>> tasks(3);
  std::vector<std::thread> threads;
  threads.reserve(3);
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      auto group = std::make_unique<cc::Group>(cc::make_topology(r, peers), network.transport(r), timeout_s, timeout_s);
      if (r == 2) return;
      cc::Engine engine(std::move(group));
      tasks[r] = make_task(Kind::barrier, DType::u8, 0, nullptr, nullptr, "lost");
      engine.run(tasks[r]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < 2; ++r) {
    if (tasks[r]->fault != cc::Fault::peer_lost || tasks[r]->ranks != std::vector<int>{2})
      return "a lost host was not noticed: " + tasks[r]->error;
  }
  return {};
}

// A rank that has done its part of an operation may leave before another one of its host looks again.
std::string check_departure() {
  NetworkInMemory network;
  const std::vector<cc::Peer> peers = peers_of(network, 2, 1);
  std::vector<std::unique_ptr<cc::Group>> groups(2);
  std::vector<std::thread> threads;
  threads.reserve(2);
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      groups[r] = std::make_unique<cc::Group>(cc::make_topology(r, peers), network.transport(r), timeout_s, timeout_s);
    });
  }
  for (std::thread& thread : threads) thread.join();
  cc::raise_signal(groups[0]->memory().my_cell().step, 1);
  groups[0]->failure_detector().send_shutdown();
  const cc::Signal& step = groups[1]->memory().cell(0).step;
  try {
    groups[1]->failure_detector().check_waiting_for(0, step, 1);
  } catch (const cc::Failure& failure) {
    return std::string("what a rank had done before it left did not count: ") + failure.what();
  }
  try {
    groups[1]->failure_detector().check_waiting_for(0, step, 2);
  } catch (const cc::Failure&) {
    return {};
  }
  return "a rank that has left was waited for";
}

// A rank that comes to a barrier of many and stops in its tree is named by all.
std::string check_barrier_tree() {
  constexpr int size = 40, stops = 9;
  NetworkInMemory network;
  const std::vector<cc::Peer> peers = peers_of(network, size, 1);
  std::vector<std::vector<int>> named(size);
  std::vector<std::unique_ptr<cc::Group>> groups(size);
  std::vector<std::thread> threads;
  threads.reserve(size);
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      groups[r] = std::make_unique<cc::Group>(cc::make_topology(r, peers), network.transport(r), timeout_s, timeout_s);
      cc::Signal& step = groups[r]->memory().my_cell().step;
      if (r == stops) return cc::raise_signal(step, step.value + 1);
      try {
        cc::Deadline deadline(0.5);
        groups[r]->step_barrier(deadline);
      } catch (const cc::Failure& failure) {
        named[r] = failure.ranks;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < size; ++r) {
    if (r != stops && named[r] != std::vector<int>{stops})
      return "a rank that stopped in a barrier was not named by rank " + std::to_string(r);
  }
  return {};
}

// A rank's connections of one kind, of which it hangs in the first wait after it has sent so many bytes, until the
// others have come to their verdict.
struct Hang {
  cc::Purpose purpose;
  uint64_t left;
  int verdicts_left;
  std::mutex mutex = {};
  std::condition_variable changed = {};

  void end() {
    const std::lock_guard<std::mutex> lock(mutex);
    --verdicts_left;
    changed.notify_all();
  }
};

class HangingConnection final : public cc::Connection {
 public:
  HangingConnection(std::unique_ptr<cc::Connection> inner, Hang& hang) : inner_(std::move(inner)), hang_(hang) {}
  ptrdiff_t send(const void* bytes, size_t n) override { return send(bytes, n, nullptr, 0, 0); }
  ptrdiff_t send(const void* head, size_t head_size, const void* body, size_t body_size, size_t sent) override {
    const ptrdiff_t n = inner_->send(head, head_size, body, body_size, sent);
    hang_.left -= static_cast<uint64_t>(n);
    return n;
  }
  ptrdiff_t receive(void* bytes, size_t n) override {
    std::unique_lock<std::mutex> lock(hang_.mutex);
    if (hang_.left == 0) hang_.changed.wait(lock, [this] { return hang_.verdicts_left == 0; });
    if (hang_.left == 0) return -1;
    // Of tensors it takes nothing before: with the others' values it would send a sum.
    return hang_.purpose == cc::Purpose::data ? 0 : inner_->receive(bytes, n);
  }
  ptrdiff_t peek(void* /*bytes*/, size_t /*n*/) override { return 0; }
  bool is_delivered() override { return true; }

 private:
  const std::unique_ptr<cc::Connection> inner_;
  Hang& hang_;
};

class HangingTransport final : public MemoryTransport {
 public:
  HangingTransport(MemoryNetwork& network, Hang& hang) : MemoryTransport(network), hang_(hang) {}

 private:
  void add_connection(cc::Connections* connections, const cc::Topology& /*topology*/,
                      const cc::PlannedConnection& planned, bool outgoing,
                      std::unique_ptr<cc::Connection> connection) override {
    if (planned.purpose == hang_.purpose)
      connection = std::make_unique<HangingConnection>(std::move(connection), hang_);
    connections->add(planned, outgoing, std::move(connection));
  }
  bool is_ready(const cc::Endpoint& endpoint, cc::PollEvent event) override {
    return dynamic_cast<const HangingConnection*>(&endpoint) || MemoryTransport::is_ready(endpoint, event);
  }
  Hang& hang_;
};

// A first rank that hangs in the middle of an allreduce is named by all, also by those that wait for others who wait
// for it. It tells other hosts nothing itself.
std::string check_hang(int size, int hosts, int hanging, uint64_t count, cc::Purpose purpose, uint64_t left) {
  constexpr double short_timeout_s = 1.0;
  NetworkInMemory network;
  Hang hang{purpose, left, size - 1};
  const std::vector<cc::Peer> peers = peers_of(network, size, hosts);
  std::vector<std::shared_ptr<cc::Task>> tasks(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      std::unique_ptr<cc::Transport> transport;
      if (r == hanging)
        transport = std::make_unique<HangingTransport>(network.memory(), hang);
      else
        transport = network.transport(r);
      auto group = std::make_unique<cc::Group>(cc::make_topology(r, peers), std::move(transport), short_timeout_s,
                                               timeout_s, 1, nullptr, false);
      group->add_by_host(purpose == cc::Purpose::data);
      cc::Engine engine(std::move(group));
      std::vector<float> in(count, value(r, 1));
      tasks[r] = make_task(Kind::allreduce, DType::f32, count, in.data(), in.data(), "hangs");
      engine.run(tasks[r]);
      if (r != hanging) hang.end();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < size; ++r) {
    if (r != hanging && tasks[r]->ranks != std::vector<int>{hanging})
      return "rank " + std::to_string(hanging) + " hung, and rank " + std::to_string(r) + " says " + tasks[r]->error;
  }
  return {};
}

// Before it sends sums to the others, and between two steps.
std::string check_hangs() {
  constexpr uint64_t on_mesh = 24 * 1024, in_steps = 2000;  // elements: more than few steps take, and fewer
  std::string hung =
      check_hang(6, 3, 4, on_mesh, cc::Purpose::data, 2 * (on_mesh / 6 * sizeof(float) + sizeof(cc::SegmentHead)));
  if (!hung.empty()) return hung;
  const uint64_t headers = sizeof(cc::Frame) + sizeof(cc::HeaderRun) + sizeof(cc::Header);
  return check_hang(8, 4, 6, in_steps, cc::Purpose::control,
                    3 * headers + sizeof(cc::Frame) + in_steps * sizeof(float));
}

// What crosses the network is the least there is: what hosts must have of each other, once.
std::string check_traffic() {
  constexpr int hosts = 8, per_host = 2, size = hosts * per_host;
  constexpr uint64_t part = 50000;  // elements from a rank to a rank
  constexpr uint64_t pairs = size * (size - per_host);
  struct Case {
    const char* name;
    Kind kind;
    uint64_t count;                      // elements of a rank's tensor
    int64_t (*split)(int from, int to);  // of an alltoall
    uint64_t least;                      // elements
  };
  const auto none = [](int, int) { return int64_t(0); };
  const Case cases[] = {
      {"alltoall", Kind::alltoall, part * size, [](int, int) { return static_cast<int64_t>(part); }, part * pairs},
      {"gather", Kind::alltoall, part, [](int, int to) { return static_cast<int64_t>(to == 5 ? part : 0); },
       part * (size - per_host)},
      {"allgather", Kind::allgather, part, none, part * size * (hosts - 1)},
      {"broadcast", Kind::broadcast, part * size, none, part * size * (hosts - 1)},
      {"allreduce", Kind::allreduce, part * size, none, part * size * 2 * (hosts - 1)},
      {"reducescatter", Kind::reducescatter, part * size, none, part * size * (hosts - 1)},
  };
  for (const Case& each : cases) {
    NetworkInMemory network;
    const std::vector<cc::Peer> peers = peers_of(network, size, hosts);
    std::vector<std::string> errors(size);
    std::atomic<uint64_t> before{0}, after{0};
    std::vector<std::thread> threads;
    threads.reserve(size);
    for (int r = 0; r < size; ++r) {
      threads.emplace_back([&, r] {
        auto group =
            std::make_unique<cc::Group>(cc::make_topology(r, peers), network.transport(r), timeout_s, timeout_s);
        group->add_by_host(true);
        cc::Engine engine(std::move(group));
        std::vector<float> in(each.count), out(each.count);
        for (uint64_t i = 0; i < each.count; ++i) in[i] = value(r, i);
        const auto run = [&](const std::shared_ptr<cc::Task>& task) {
          engine.run(task);
          if (!task->error.empty()) errors[r] = task->error;
        };
        run(make_task(Kind::barrier, DType::u8, 0, nullptr, nullptr, "before"));
        if (r == 0) before = network.sent();
        const auto task =
            make_task(each.kind, DType::f32, each.count, in.data(),
                      each.kind == Kind::allgather || each.kind == Kind::alltoall ? nullptr : out.data(), each.name);
        for (int to = 0; each.kind == Kind::alltoall && to < size; ++to)
          task->operation.splits.push_back(each.split(r, to));
        run(task);
        const auto* received = reinterpret_cast<const float*>(task->operation.gathered.get());
        for (int from = 0; each.kind == Kind::alltoall && from < size; ++from) {
          int64_t at = 0;
          for (int to = 0; to < r; ++to) at += each.split(from, to);
          for (const int64_t end = at + each.split(from, r); at < end; ++at) {
            if (*received++ != value(from, static_cast<uint64_t>(at)))
              errors[r] = "wrong part from rank " + std::to_string(from);
          }
        }
        run(make_task(Kind::barrier, DType::u8, 0, nullptr, nullptr, "after"));
        if (r == 0) after = network.sent();
        run(make_task(Kind::barrier, DType::u8, 0, nullptr, nullptr, "end"));
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& error : errors) {
      if (!error.empty()) return std::string(each.name) + ": " + error;
    }
    const double ratio = static_cast<double>(after - before) / static_cast<double>(each.least * sizeof(float));
    if (ratio < 1 || ratio > 1.02)
      return std::string(each.name) + " sent " + std::to_string(ratio) + " of what it must";
  }
  return {};
}

// On a slow network those that have nothing to do wait for longer than the timeout for those that move bytes: of hosts
// with different numbers of ranks or, of an alltoall, of hosts of which one sends another all there is to send.
std::string check_slow_network(Kind kind, double short_timeout_s = 2.0) {
  const bool is_alltoall = kind == Kind::alltoall;
  const int size = is_alltoall ? 6 : 3;
  const uint64_t count = is_alltoall ? 3000000 : 300000;
  NetworkInMemory network;
  network.be_slow(std::chrono::milliseconds(static_cast<int>((is_alltoall ? 1 : 10) * short_timeout_s)));
  const std::vector<cc::Peer> peers = peers_of(network, size, is_alltoall ? 3 : 2);
  std::vector<std::shared_ptr<cc::Task>> tasks(static_cast<size_t>(size));
  std::vector<double> pauses(static_cast<size_t>(size), timeout_s);  // until a rank's error
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      cc::Engine engine(
          std::make_unique<cc::Group>(cc::make_topology(r, peers), network.transport(r), short_timeout_s, timeout_s));
      std::vector<float> mine(count, value(r, 1));
      tasks[r] = make_task(kind, DType::f32, mine.size(), mine.data(), mine.data(), "slow", 2);
      if (is_alltoall) {
        tasks[r]->operation.splits.assign(static_cast<size_t>(size), 0);
        tasks[r]->operation.splits[r == 2 ? 5 : r] = static_cast<int64_t>(count);
      }
      engine.run(tasks[r]);
      if (tasks[r]->error.empty()) {
        tasks[r] = make_task(Kind::barrier, DType::u8, 0, nullptr, nullptr, "end");
        engine.run(tasks[r]);
      }
      if (!tasks[r]->error.empty()) pauses[r] = network.longest_pause();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < size; ++r) {
    if (tasks[r]->error.empty()) continue;
    // On a busy machine nothing may move for so long that to give up is right, on whichever rank comes first.
    const bool was_busy = *std::min_element(pauses.begin(), pauses.end()) > short_timeout_s / 2;
    if (was_busy && short_timeout_s < timeout_s) return check_slow_network(kind, 2 * short_timeout_s);
    return "on a slow network: " + tasks[r]->error;
  }
  return {};
}

// Many ranks take their time under the sanitizers: no large tensors there.
void run_case(Network& network, int size, int hosts, int sockets, uint64_t max_elements, bool by_host = false) {
  const std::vector<cc::Peer> peers = peers_of(network, size, hosts);
  std::vector<std::string> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      try {
        auto group = std::make_unique<cc::Group>(cc::make_topology(r, peers), network.transport(r), timeout_s,
                                                 timeout_s, sockets);
        group->add_by_host(by_host);
        cc::Engine engine(std::move(group));
        for (const uint64_t count : {0, 1, 1031, 70001, 1100003}) {
          if (count > max_elements) continue;
          const std::string error = run_rank(engine, count, by_host);
          if (!error.empty()) errors[r] = std::to_string(count) + " elements: " + error;
          if (!error.empty()) return;
        }
        auto end = make_task(Kind::barrier, DType::u8, 0, nullptr, nullptr, "end");
        engine.run(end);
        errors[r] = end->error;
        const cc::Traffic& traffic = engine.traffic();
        if (traffic.steps > traffic.exchanges * static_cast<uint64_t>(std::max(1, log2_of(hosts))))
          errors[r] = "more steps than log2 of the hosts";
        if (engine.topology().is_leader() && hosts > 1 && traffic.exchanges == 0) errors[r] = "nothing was counted";
      } catch (const std::exception& error) {
        errors[r] = error.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int r = 0; r < size; ++r) {
    if (errors[r].empty()) continue;
    std::printf("%d ranks on %d hosts, %d sockets, rank %d: %s\n", size, hosts, sockets, r, errors[r].c_str());
    ++failures;
  }
}

// Hosts with one rank each share no memory and pass no descriptor, so nothing may have opened a socket.
void run_cases_in_memory() {
  const int before = open_sockets();
  for (const auto& place : {std::pair<int, int>{2, 2}, {3, 3}, {5, 5}, {4, 2}, {5, 2}}) {
    NetworkInMemory network;
    run_case(network, place.first, place.second, 1, 1100003);
  }
  for (const int hosts : {2, 3, 11}) {
    NetworkInMemory network;
    std::atomic<bool> done{false};
    int most = 0;
    std::thread watching([&] {
      for (; !done; std::this_thread::sleep_for(std::chrono::milliseconds(5))) most = std::max(most, open_sockets());
    });
    run_case(network, hosts, hosts, 2, 70001);
    done = true;
    watching.join();
    if (most > before) std::printf("%d hosts in memory: %d sockets were open\n", hosts, most - before);
    failures += most > before ? 1 : 0;
  }
  for (const auto& place : {std::pair<int, int>{4, 2}, {6, 3}, {12, 4}, {3, 3}}) {
    NetworkInMemory network;
    run_case(network, place.first, place.second, 2, 1100003, true);
  }
  for (const auto& place : {std::pair<int, int>{9, 4}, {12, 6}, {14, 11}}) {  // no mesh in rank order
    NetworkInMemory network;
    run_case(network, place.first, place.second, 1, 70001);
  }
  NetworkInMemory crowded;  // a host, for its barriers to be trees
  run_case(crowded, 40, 1, 1, 1031);
  NetworkInMemory too_many;  // connections for a mesh
  run_case(too_many, 3, 3, 33, 70001);
  for (const std::string& error :
       {check_lost_host(), check_hangs(), check_barrier_tree(), check_traffic(), check_slow_network(Kind::allreduce),
        check_slow_network(Kind::broadcast), check_slow_network(Kind::alltoall)}) {
    if (!error.empty()) std::printf("%s\n", error.c_str());
    failures += error.empty() ? 0 : 1;
  }
}

// Blocks whose pages are kept come again, no more of them than were in use at once, and none after a failure.
std::string check_kept_blocks() {
  constexpr size_t small = size_t(64) << 10, large = size_t(192) << 10;
  const std::shared_ptr<cc::Arena> arena = cc::Arena::share(cc::make_topology(0, {cc::Peer{}}), {}, 1.0);
  void *one = arena->allocate(small, cc::Pages::kept), *other = arena->allocate(small, cc::Pages::kept);
  arena->release(one);
  if (arena->allocate(small, cc::Pages::touched) == one) return "a kept block was given out as another kind";
  if (arena->allocate(small, cc::Pages::kept) != one) return "a kept block did not come again";
  std::memset(other, 1, small);
  arena->release(one);
  arena->release(other);
  auto* wide = static_cast<char*>(arena->allocate(large, cc::Pages::kept));
  void* again = arena->allocate(small, cc::Pages::touched);
  if (again != one) return "more pages are kept than were in use at once";
  arena->release(wide);
  arena->release(again);
  void* last = arena->allocate(small, cc::Pages::kept);
  arena->retire();
  arena->release(last);
  if (arena->allocate(small, cc::Pages::kept) == last) return "a block came again after a failure";
  return arena->use().now == 2 * small ? "" : "wrong bytes in use";
}

void run_cases_over_tcp() {
  const auto run = [](int size, int hosts, int sockets, uint64_t max_elements) {
    TcpNetwork network(size);
    run_case(network, size, hosts, sockets, max_elements);
  };
  for (const auto& place : {std::pair<int, int>{1, 1}, {2, 1}, {4, 1}, {2, 2}, {3, 3}})
    run(place.first, place.second, 1, 1100003);
  for (const auto& place : {std::pair<int, int>{2, 2}, {3, 3}, {5, 2}}) run(place.first, place.second, 3, 1100003);
  run(14, 11, 1, 70001);
}

}  // namespace

// Without an argument: everything. "memory": only the cases over the transport in memory.
int main(int arguments, char** words) {
  // The ranks of a host share a range as large as its memory for each: of 40 ranks in one process 1,600 times that, for
  // which ThreadSanitizer has no room.
  const rlimit limit{size_t(4) << 30, size_t(4) << 30};
  setrlimit(RLIMIT_FSIZE, &limit);
  const bool only_memory = arguments > 1 && std::string(words[1]) == "memory";
  run_cases_in_memory();
  if (!only_memory) {
    for (const std::string& error :
         {check_descriptors(), check_kept_blocks(), check_long_operation(), check_departure()}) {
      if (!error.empty()) std::printf("%s\n", error.c_str());
      failures += error.empty() ? 0 : 1;
    }
    for (int hosts = 2; hosts <= 300; ++hosts) {
      const std::string error = check_dissemination(hosts);
      if (!error.empty()) std::printf("steps of %d hosts: %s\n", hosts, error.c_str());
      failures += error.empty() ? 0 : 1;
    }
    run_cases_over_tcp();
  }
  std::printf(failures ? "%d failures\n" : "selftest: all well\n", failures);
  return failures ? 1 : 0;
}
