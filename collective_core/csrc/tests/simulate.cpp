// Many hosts in one thread and in time that is only counted: the engine's own negotiation and algorithms, over a
// network that is a cost model. No process, thread or socket per rank: each is a fiber, which runs until it waits, for
// a message or for a rank of its host; when all wait, the clock is put on to the next message's arrival.
//
//   collective_core_simulate HOSTS RANKS_PER_HOST HOP_US GB_PER_S MESSAGE_US OPERATION BYTES [OPERATION BYTES ...]
//
// Prints for each operation: its name, bytes, steps (messages that follow each other on the longest way), microseconds,
// and messages and bytes that all hosts together, and the busiest one, have sent. Steps come from a run in which a hop
// takes 1 and all else nothing. What is computed takes no time in either.
//
// benchmarks/engine/simulation.py makes tables of it.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace {

using cc::Kind;

constexpr double forever_s = 1e9;  // the real clock means nothing here
constexpr size_t stack_bytes = size_t(256) << 10;

[[noreturn]] void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::fflush(stdout);
  _exit(1);
}

// ----------------------------------------------------------------------------------------- fibers, and their clock

struct Fiber {
  ucontext_t context;
  std::function<void()> body;
  int host;
  bool in_futex = false;
  bool is_queued = false;
};

struct Cost {
  double hop, byte, message;  // microseconds: of the network, and of the sender for each
};

// Bytes on their way from one end of a connection to the other.
struct Pipe {
  std::vector<char> bytes;
  size_t read = 0, arrived = 0;
  int to = 0;  // host
  Fiber* waiter = nullptr;
};

class Simulation {
 public:
  struct Sent {
    uint64_t messages = 0, bytes = 0;
  };

  explicit Simulation(int hosts) : of_hosts_(static_cast<size_t>(hosts)) {}

  void start(int host, std::function<void()> body) {
    fibers_.push_back(std::make_unique<Fiber>());
    Fiber* fiber = fibers_.back().get();
    fiber->body = std::move(body);
    fiber->host = host;
    getcontext(&fiber->context);
    void* stack =
        mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) fail("no memory for stacks");
    fiber->context.uc_stack = {stack, 0, stack_bytes};
    makecontext(&fiber->context, &Simulation::enter, 0);
    of_hosts_[static_cast<size_t>(host)].fibers.push_back(fiber);
    wake(fiber);
  }
  // Until nothing can go on.
  void run() {
    for (;;) {
      while (!ready_.empty()) {
        current_ = ready_.front();
        ready_.pop_front();
        current_->is_queued = false;
        swapcontext(&main_, &current_->context);
      }
      current_ = nullptr;
      if (arrivals_.empty()) return;
      const Arrival next = arrivals_.top();
      arrivals_.pop();
      now_ = next.at;
      next.pipe->arrived += next.bytes;
      if (next.pipe->waiter) wake(std::exchange(next.pipe->waiter, nullptr));
    }
  }
  void park() { swapcontext(&current_->context, &main_); }
  void wake(Fiber* fiber) {
    if (!std::exchange(fiber->is_queued, true)) ready_.push_back(fiber);
  }
  void wake_all() {
    for (const auto& fiber : fibers_) wake(fiber.get());
  }
  Fiber* current() const { return current_; }
  void wait_in_futex() {
    current_->in_futex = true;
    park();
  }
  void wake_host() {  // what sleeps there looks for itself whether it was meant
    for (Fiber* fiber : of_hosts_[static_cast<size_t>(current_->host)].fibers) {
      if (std::exchange(fiber->in_futex, false)) wake(fiber);
    }
  }

  void begin(const Cost& cost) {
    cost_ = cost;
    now_ = 0;
    for (OfHost& host : of_hosts_) {
      host.sent = {};
      host.sends_until = host.receives_until = 0;
    }
  }
  double now() const { return now_; }
  const Sent& sent_by(int host) const { return of_hosts_[static_cast<size_t>(host)].sent; }
  // A host sends one message after the other, and receives one after the other.
  void send(Pipe* pipe, size_t bytes) {
    OfHost& from = of_hosts_[static_cast<size_t>(current_->host)];
    OfHost& to = of_hosts_[static_cast<size_t>(pipe->to)];
    const double takes = static_cast<double>(bytes) * cost_.byte;
    from.sent.messages += 1;
    from.sent.bytes += bytes;
    from.sends_until = std::max(from.sends_until, now_) + cost_.message + takes;
    to.receives_until = std::max(to.receives_until + takes, from.sends_until + cost_.hop);
    arrivals_.push({to.receives_until, ++sends_, pipe, bytes});
  }

 private:
  struct Arrival {
    double at;
    uint64_t number;
    Pipe* pipe;
    size_t bytes;
    bool operator<(const Arrival& other) const {  // a priority queue has the greatest first
      return at != other.at ? at > other.at : number > other.number;
    }
  };
  struct OfHost {
    Sent sent;
    double sends_until = 0, receives_until = 0;
    std::vector<Fiber*> fibers;
  };
  static void enter();

  ucontext_t main_{};
  Fiber* current_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::deque<Fiber*> ready_;
  std::priority_queue<Arrival> arrivals_;
  Cost cost_{};
  double now_ = 0;
  uint64_t sends_ = 0;
  std::vector<OfHost> of_hosts_;
};

Simulation* simulation = nullptr;

void Simulation::enter() {
  simulation->current()->body();
  fail("a rank has ended");
}

long call_system(long number, const long* of) {
  using Syscall = long (*)(long, ...);
  static const auto real = reinterpret_cast<Syscall>(dlsym(RTLD_NEXT, "syscall"));
  return real(number, of[0], of[1], of[2], of[3], of[4], of[5]);
}

}  // namespace

// In the place of the C library's: how ranks of a host wait for each other (base/wait.h).
extern "C" long syscall(long number, ...) noexcept {
  long of[6];
  va_list words;
  va_start(words, number);
  for (long& word : of) word = va_arg(words, long);
  va_end(words);
  if (number != SYS_futex || !simulation || !simulation->current()) return call_system(number, of);
  if (static_cast<int>(of[1]) == FUTEX_WAKE)
    simulation->wake_host();
  else
    simulation->wait_in_futex();
  return 0;
}
extern "C" int sched_yield() noexcept {
  return 0;
}

namespace {

// ------------------------------------------------------------------------------------------------------ the network

struct Link {
  Pipe pipes[2];  // from the caller, and back
  cc::Fd fds[2];  // of a local connection
};

class SimulatedConnection final : public cc::Connection {
 public:
  SimulatedConnection(std::shared_ptr<Link> link, bool calls)
      : link_(std::move(link)), out_(link_->pipes[calls ? 0 : 1]), in_(link_->pipes[calls ? 1 : 0]) {}
  ptrdiff_t send(const void* bytes, size_t n) override { return send(bytes, n, nullptr, 0, 0); }
  ptrdiff_t send(const void* head, size_t head_size, const void* body, size_t body_size, size_t /*sent*/) override {
    const char *first = static_cast<const char*>(head), *second = static_cast<const char*>(body);
    out_.bytes.insert(out_.bytes.end(), first, first + head_size);
    out_.bytes.insert(out_.bytes.end(), second, second + body_size);
    simulation->send(&out_, head_size + body_size);
    return static_cast<ptrdiff_t>(head_size + body_size);
  }
  ptrdiff_t receive(void* bytes, size_t n) override {
    const ptrdiff_t got = peek(bytes, n);
    in_.read += static_cast<size_t>(got);
    if (in_.read == in_.bytes.size()) {
      in_.bytes.clear();
      in_.read = in_.arrived = 0;
    }
    return got;
  }
  ptrdiff_t peek(void* bytes, size_t n) override {
    n = std::min(n, in_.arrived - in_.read);
    if (n) std::memcpy(bytes, in_.bytes.data() + in_.read, n);
    return static_cast<ptrdiff_t>(n);
  }
  bool is_delivered() override { return true; }
  bool has_arrived() const { return in_.arrived > in_.read; }
  Pipe& in() const { return in_; }

 private:
  const std::shared_ptr<Link> link_;
  Pipe &out_, &in_;
};

class SimulatedTransport final : public cc::Transport {
 public:
  using Key = std::tuple<int, int, cc::Purpose, int>;  // caller, called, purpose, channel
  using Links = std::map<Key, std::shared_ptr<Link>>;
  explicit SimulatedTransport(Links& links) : links_(links) {}

  cc::Connections connect(const cc::Topology& topology, int sockets, double /*seconds*/) override {
    const cc::ConnectionPlan plan = cc::plan_connections(topology, sockets);
    cc::Connections connections;
    const auto add = [&](const cc::PlannedConnection& planned, bool calls) {
      const int from = calls ? topology.rank : planned.peer, to = calls ? planned.peer : topology.rank;
      const Key key{from, to, planned.purpose, planned.channel};
      const auto found = links_.find(key);
      const bool is_first = found == links_.end();
      const std::shared_ptr<Link> link = is_first ? std::make_shared<Link>() : found->second;
      if (is_first)
        links_[key] = link;
      else
        links_.erase(found);
      link->pipes[calls ? 1 : 0].to = topology.host;
      if (planned.purpose != cc::Purpose::local)
        return connections.add(planned, calls, std::make_unique<SimulatedConnection>(link, calls));
      int ends[2];
      if (is_first) {
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) fail("no sockets");
        link->fds[0] = cc::Fd(ends[0]);
        link->fds[1] = cc::Fd(ends[1]);
      }
      connections.local[planned.peer] = std::move(link->fds[calls ? 0 : 1]);
    };
    for (const cc::PlannedConnection& planned : plan.outgoing) add(planned, true);
    for (const cc::PlannedConnection& planned : plan.incoming) add(planned, false);
    return connections;
  }
  // Without an end of time: who waits for nothing that comes is found by Simulation::run.
  bool poll(std::vector<cc::PollEntry>& entries, int milliseconds) override {
    for (bool any = false;; simulation->park()) {
      for (cc::PollEntry& entry : entries) {
        const auto* connection = static_cast<const SimulatedConnection*>(entry.endpoint);
        entry.ready = connection && (entry.event == cc::PollEvent::send || connection->has_arrived());
        any = any || entry.ready;
      }
      if (any || milliseconds == 0) return any;
      for (const cc::PollEntry& entry : entries) {
        if (entry.endpoint)
          static_cast<const SimulatedConnection*>(entry.endpoint)->in().waiter = simulation->current();
      }
    }
  }

 private:
  Links& links_;
};

// ---------------------------------------------------------------------------------------------------- the operations

struct Request {
  Kind kind;
  uint64_t bytes;
};

Kind kind_of(const std::string& name) {
  for (int kind = 0; kind < static_cast<int>(Kind::join); ++kind) {
    if (name == cc::name_of(static_cast<Kind>(kind))) return static_cast<Kind>(kind);
  }
  fail("invalid operation: " + name);
}

float value(int rank, uint64_t i) {
  return static_cast<float>((i + static_cast<uint64_t>(rank)) % 5);
}

void run_operation(cc::Engine& engine, const Request& request) {
  const int rank = engine.topology().rank, size = engine.topology().size;
  const uint64_t count = request.bytes / sizeof(float);
  const auto task = std::make_shared<cc::Task>();
  cc::Header& header = task->operation.header;
  header.kind = request.kind;
  header.dtype = cc::DType::f32;
  header.reduce = cc::ReduceOp::sum;
  header.ndim = 1;
  header.count = cc::has_tensor(request.kind) ? count : 0;
  header.dims[0] = static_cast<int64_t>(header.count);
  header.prescale = header.postscale = 1.0;
  header.name_hash = cc::hash_of("simulated");
  std::snprintf(header.name, sizeof header.name, "simulated");
  std::vector<float> in(count), out(count);
  for (uint64_t i = 0; i < count; ++i) in[i] = value(rank, i);
  const bool has_output = cc::is_reduction(request.kind) || request.kind == Kind::broadcast;
  task->operation.input = in.data();
  task->operation.output = has_output ? out.data() : nullptr;
  if (request.kind == Kind::alltoall) {
    for (int to = 0; to < size; ++to) {
      const auto share = static_cast<uint64_t>(size);
      task->operation.splits.push_back(
          static_cast<int64_t>(count / share + (static_cast<uint64_t>(to) < count % share)));
    }
  }
  engine.run(task);
  if (!task->error.empty()) fail(task->error);
  for (uint64_t i = 0; request.kind == Kind::allreduce && i < count; ++i) {
    uint64_t sum = 0;
    for (uint64_t k = 0; k < 5; ++k) sum += (static_cast<uint64_t>(size) + 4 - k) / 5 * ((i + k) % 5);
    if (out[i] != static_cast<float>(sum)) fail("wrong sum");
  }
  for (uint64_t i = 0; request.kind == Kind::broadcast && rank && i < count; ++i) {
    if (out[i] != value(0, i)) fail("wrong broadcast");
  }
  const auto* gathered = reinterpret_cast<const float*>(task->operation.received_bytes());
  for (int r = 0; request.kind == Kind::allgather && r < size; ++r) {
    for (uint64_t i = 0; i < count; ++i) {
      if (*gathered++ != value(r, i)) fail("wrong block");
    }
  }
}

struct Job {
  int hosts, per_host;
  Request request{};
  int waiting = 0;  // ranks that wait for a request
};

void be_rank(Job& job, const cc::Topology& topology, SimulatedTransport::Links& links,
             const std::shared_ptr<cc::Recorder>& recorder, const std::shared_ptr<cc::Arena>& arena) {
  auto group = std::make_unique<cc::Group>(topology, std::make_unique<SimulatedTransport>(links), forever_s, forever_s,
                                           1, arena, false);
  group->add_by_host(true);
  // What only failures need, of which there are none: descriptors, and a megabyte per rank of who is who.
  group->connections().local.clear();
  cc::Engine engine(std::move(group), recorder);
  std::vector<cc::Peer>().swap(const_cast<cc::Topology&>(engine.topology()).peers);
  for (;;) {
    ++job.waiting;
    simulation->park();
    run_operation(engine, job.request);
  }
}

}  // namespace

int main(int arguments, char** words) {
  if (arguments < 8 || arguments % 2)
    fail("expected HOSTS RANKS_PER_HOST HOP_US GB_PER_S MESSAGE_US OPERATION BYTES ...");
  const auto number = [&](int word) { return std::strtod(words[word], nullptr); };
  Job job{static_cast<int>(number(1)), static_cast<int>(number(2))};
  const Cost costs[] = {{1, 0, 0}, {number(3), 1e-3 / number(4), number(5)}};
  const int size = job.hosts * job.per_host;
  std::vector<cc::Peer> peers(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) {
    cc::Peer& peer = peers[static_cast<size_t>(r)];
    peer.rank = peer.global_rank = r;
    peer.host_id = "host" + std::to_string(r / job.per_host);
  }
  const cc::Topology of_first = cc::make_topology(0, peers);
  const auto recorder = std::make_shared<cc::Recorder>();
  const std::shared_ptr<cc::Arena> arena = cc::Arena::share(cc::make_topology(0, {cc::Peer{}}), {}, 1.0);
  SimulatedTransport::Links links;
  Simulation one(job.hosts);
  simulation = &one;
  for (int host = 0; host < job.hosts; ++host) {
    for (int local = 0; local < job.per_host; ++local) {
      one.start(host, [&, host, local] {
        cc::Topology topology = of_first;
        topology.host = host;
        topology.local_rank = local;
        topology.rank = host * job.per_host + local;
        be_rank(job, topology, links, recorder, arena);
      });
    }
    one.run();
    if (job.waiting != (host + 1) * job.per_host) fail("ranks do not begin");
  }
  for (int word = 6; word < arguments; word += 2) {
    job.request = {kind_of(words[word]), std::strtoull(words[word + 1], nullptr, 10)};
    double took[2];
    for (int run = 0; run < 2; ++run) {
      one.begin(costs[run]);
      job.waiting = 0;
      one.wake_all();
      one.run();
      if (job.waiting != size) fail("ranks wait for what does not come");
      took[run] = one.now();
    }
    Simulation::Sent all, most;
    for (int host = 0; host < job.hosts; ++host) {
      const Simulation::Sent& sent = one.sent_by(host);
      all = {all.messages + sent.messages, all.bytes + sent.bytes};
      most = {std::max(most.messages, sent.messages), std::max(most.bytes, sent.bytes)};
    }
    std::printf("%s %llu %.0f %.3f %llu %llu %llu %llu\n", words[word],
                static_cast<unsigned long long>(job.request.bytes), took[0], took[1],
                static_cast<unsigned long long>(all.messages), static_cast<unsigned long long>(all.bytes),
                static_cast<unsigned long long>(most.messages), static_cast<unsigned long long>(most.bytes));
  }
  std::fflush(stdout);
  _exit(0);  // the ranks are in the middle of their loops
}
