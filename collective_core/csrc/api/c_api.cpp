#include "api/c_api.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/process.h"
#include "base/cores.h"
#include "base/interruption.h"
#include "engine/engine.h"
#include "kernels/kernels.h"
#include "transport/external/external_transport.h"
#include "transport/tcp/interfaces.h"
#include "transport/tcp/sha256.h"
#include "transport/tcp/tcp_transport.h"

namespace {

// Each is after a comma.
std::vector<std::string> addresses_in(const char* text) {
  std::vector<std::string> addresses;
  for (; *text; ++text) {
    if (*text == ',') addresses.emplace_back();
    if (*text != ',' && !addresses.empty()) addresses.back() += *text;
  }
  return addresses;
}

using cc::engine_of, cc::guarded, cc::make_task, cc::refuse_forked, cc::result_of, cc::run_task;

thread_local std::string last_error;
thread_local std::vector<int> last_ranks;
thread_local bool last_one_name = false;

struct Submitted {
  std::shared_ptr<cc::Task> task;
  std::weak_ptr<cc::Engine> engine;

  bool is_done() const {
    const std::shared_ptr<cc::Engine> current = engine.lock();
    return current ? current->is_done(*task) : task->done.load();
  }
  bool wait(double seconds) const {
    const std::shared_ptr<cc::Engine> current = engine.lock();
    return current ? current->wait(*task, seconds) : task->done.load();
  }
};

// All state of the process. Never destroyed by exit(): a worker thread may still be running then.
struct Process {
  std::mutex mutex;
  pid_t owner = 0;
  cc::Listeners listeners;
  std::map<int32_t, std::shared_ptr<cc::Engine>> engines;  // by process set
  std::map<int64_t, Submitted> tasks;                      // by handle
  int64_t next_handle = 1;
  std::shared_ptr<cc::Recorder> recorder;
  std::vector<std::shared_ptr<cc::Counters>> counters;  // of engines that run or are being closed
  std::map<int32_t, cc::Totals> totals;                 // of those that are gone, by process set
  std::map<int, uint64_t> waited_for_ns;                // likewise, by rank
  uint64_t waited_ns = 0;                               // likewise
  std::shared_ptr<cc::Arena> arena;                     // of set 0, shared by all sets
  std::map<void*, std::shared_ptr<cc::Arena>> blocks;   // by address: what cc_allocate gave out
  std::shared_ptr<cc::ExternalTransports> external_transports = std::make_shared<cc::ExternalTransports>();
};
Process& process() {
  static auto* state = new Process;  // NOLINT: leaked on purpose
  return *state;
}

// Set in a child that was forked from a rank. Asking getpid() in every call would cost as much as a small operation.
std::atomic<bool> forked{false};
void note_fork() {
  if (process().owner != 0) forked = true;
}

void require(bool condition, const char* complaint) {
  if (!condition) throw cc::Failure(cc::Fault::invalid, complaint);
}

// The state of the process while nobody else changes it.
class Locked {
 public:
  Locked() {
    refuse_forked();
    lock_ = std::unique_lock<std::mutex>(process().mutex);
  }
  Process* operator->() const { return &process(); }

 private:
  std::unique_lock<std::mutex> lock_;
};

// What has failed in one process set is why this rank leaves the others, too: who waits for it there is told so.
void end_all(const std::map<int32_t, std::shared_ptr<cc::Engine>>& engines) {
  std::optional<cc::Failure> first;
  for (const auto& entry : engines) {
    const std::optional<cc::Failure> failure = entry.second->end();
    if (!first) first = failure;
  }
  for (const auto& entry : engines) {
    if (first) entry.second->leave_because(*first);
  }
}

void keep_totals(const std::map<int32_t, std::shared_ptr<cc::Engine>>& closed) {
  const Locked state;
  for (const auto& entry : closed) {
    const std::shared_ptr<cc::Counters>& counters = entry.second->counters();
    counters->add_to(&state->totals[entry.first]);
    counters->add_to(&state->waited_for_ns);
    state->counters.erase(std::find(state->counters.begin(), state->counters.end(), counters));
  }
}

Submitted submitted(int64_t handle) {
  const Locked state;
  const auto found = state->tasks.find(handle);
  if (found == state->tasks.end()) throw cc::Failure(cc::Fault::invalid, "unknown handle");
  return found->second;
}

std::shared_ptr<cc::Recorder> the_recorder() {
  const Locked state;
  require(state->recorder != nullptr, "nothing has been recorded yet");
  return state->recorder;
}

// Adds to the time that callers have waited for an operation that was submitted before.
class WaitClock {
 public:
  WaitClock() = default;
  WaitClock(const WaitClock&) = delete;
  WaitClock& operator=(const WaitClock&) = delete;
  ~WaitClock() { process().recorder->add_wait(cc::monotonic_ns() - begin_); }

 private:
  int64_t begin_ = cc::monotonic_ns();
};

}  // namespace

namespace cc {

int32_t remember(Fault fault, const std::string& text, const std::vector<int>& ranks, bool one_name) {
  last_error = text;
  last_ranks = ranks;
  last_one_name = one_name;
  return static_cast<int32_t>(fault);
}

void refuse_forked() {
  if (!forked) return;
  throw Failure(
      Fault::closed,
      "this process was forked from a rank and is not one itself; start data loaders with spawn or forkserver");
}

std::shared_ptr<Engine> engine_of(int32_t process_set) {
  const Locked state;
  const auto found = state->engines.find(process_set);
  if (found != state->engines.end()) return found->second;
  if (process_set == 0) throw Failure(Fault::closed, "the engine is not initialised: call init() first");
  throw Failure(Fault::closed, "this rank is not in process set " + std::to_string(process_set));
}

std::shared_ptr<Task> make_task(const cc_operation& op, int size) {
  require(op.kind >= 0 && op.kind < static_cast<int>(Kind::count), "unknown kind of collective");
  require(op.dtype >= 0 && op.dtype < static_cast<int>(DType::count), "unknown element type");
  require(op.reduce >= 0 && op.reduce <= static_cast<int>(ReduceOp::product), "unknown reduction");
  require(op.ndim >= 0 && op.ndim < 256, "too many dimensions");
  auto task = std::make_shared<Task>();
  Header& header = task->operation.header;
  header.kind = static_cast<Kind>(op.kind);
  header.dtype = static_cast<DType>(op.dtype);
  header.reduce = static_cast<ReduceOp>(op.reduce);
  header.ndim = static_cast<uint8_t>(op.ndim);
  header.root = op.root;
  header.count = op.count;
  header.prescale = op.prescale;
  header.postscale = op.postscale;
  std::copy_n(op.dims, std::min(op.ndim, static_cast<int32_t>(max_dims)), header.dims);
  header.shape_hash = op.fused;
  for (int32_t i = max_dims; i < op.ndim; ++i) {
    header.dims[max_dims - 1] *= op.dims[i];
    header.shape_hash = header.shape_hash * 16777619U + static_cast<uint32_t>(op.dims[i]) + 1;
  }
  const char* name = op.name ? op.name : "";
  header.name_hash = hash_of(name);
  std::strncpy(header.name, name, name_bytes - 1);
  header.device = static_cast<Device>(op.device);
  require(op.device >= 0 && op.device < static_cast<int>(Device::count), "unknown device");
  if (op.unsupported_reason && op.unsupported_reason[0]) {
    header.unsupported = 1;
    task->operation.unsupported_reason = op.unsupported_reason;
  }
  const bool empty = op.count == 0 || !has_tensor(header.kind) || header.unsupported;
  const bool allocates = header.kind == Kind::allgather || header.kind == Kind::alltoall;
  const bool any_root = header.kind != Kind::broadcast || header.unsupported;
  require(any_root || (op.root >= 0 && op.root < size), "the root is not a rank of this job");
  require(empty || op.input, "input is missing");
  require(empty || allocates || op.output, "output is missing");
  require(op.count <= UINT64_MAX / 64, "too many elements");
  require(header.kind != Kind::reducescatter || header.unsupported || op.ndim > 0, "a scalar cannot be scattered");
  require(header.kind != Kind::alltoall || header.unsupported || (op.splits && op.ndim > 0), "splits are missing");
  if (op.splits) task->operation.splits.assign(op.splits, op.splits + size);
  task->operation.input = op.input;
  task->operation.output = op.output;
  task->operation.tag = op.tag;
  task->operation.inner = op.inner != 0;
  header.ordered = op.ordered ? 1 : 0;
  return task;
}

int32_t result_of(const Task& task) {
  return task.fault == Fault::none ? 0 : remember(task.fault, task.error, task.ranks, task.one_name);
}

int32_t run_task(Engine& engine, const std::shared_ptr<Task>& task) {
  process().recorder->add_wait(engine.run(task) - task->queued_ns);
  return result_of(*task);
}

}  // namespace cc

int32_t cc_abi_version() {
  return cc_abi;
}
const char* cc_version() {
  return CC_VERSION;
}
const char* cc_kernels() {
  return cc::kernels().name;
}
const char* cc_last_error() {
  return last_error.c_str();
}

int32_t cc_last_error_has_one_name() {
  return last_one_name ? 1 : 0;
}

int32_t cc_last_error_ranks(int32_t* ranks, int32_t capacity) {
  const auto count = static_cast<int32_t>(last_ranks.size());
  std::copy_n(last_ranks.begin(), std::min(count, capacity), ranks);
  return count;
}

void cc_watch_signals(int (*acquire)(), void (*release)(int), int (*run_handlers)(),
                      void (*fetch)(void**, void**, void**)) {
  cc::use_interpreter({acquire, release, run_handlers, fetch});
}

int32_t cc_in_handler() {
  return cc::is_in_handler() ? 1 : 0;
}

void cc_take_raised(void** type_value_traceback) {
  cc::take_raised(type_value_traceback);
}

int32_t cc_interfaces(char* text, uint64_t capacity) {
  return guarded([&] {
    const std::string lines = cc::list_interfaces();
    require(lines.size() < capacity, "too many interfaces for the buffer");
    std::memcpy(text, lines.c_str(), lines.size() + 1);
  });
}

int32_t cc_open(const char* address, const char* rails, int32_t* port, char* socket_name, uint64_t capacity) {
  return guarded([&] {
    const Locked state;
    std::vector<std::string> addresses = addresses_in(rails);
    if (address) addresses.insert(addresses.begin(), address);
    state->listeners = cc::open_listeners(addresses);
    require(state->listeners.socket_name.size() < capacity, "the buffer for the socket's name is too small");
    std::memcpy(socket_name, state->listeners.socket_name.c_str(), state->listeners.socket_name.size() + 1);
    *port = state->listeners.port;
  });
}

int32_t cc_connect(int32_t process_set, int32_t rank, int32_t size, const cc_peer* peers, const uint8_t* secret,
                   uint64_t secret_bytes, double timeout, double start_timeout, double stall_warning, int32_t sockets,
                   int32_t single_copy, int32_t semantics, int32_t by_host) {
  return guarded([&] {
    refuse_forked();
    require(size >= 1 && secret_bytes >= 16 && timeout > 0 && start_timeout > 0 && sockets >= 1,
            "wrong arguments of cc_connect");
    require(semantics >= 0 && semantics < static_cast<int32_t>(cc::Semantics::count), "unknown semantics");
    std::vector<cc::Peer> table;
    for (int32_t i = 0; i < size; ++i) {
      const cc_peer& p = peers[i];
      table.push_back({p.rank, p.global_rank, p.pid, p.host_id, p.host_name, p.address, p.port, p.socket_name,
                       addresses_in(p.rails)});
    }
    cc::Listeners listeners;
    std::shared_ptr<cc::Arena> arena;
    {
      const Locked state;
      require(state->engines.count(process_set) == 0, "the engine is initialised already");
      listeners = std::move(state->listeners);
      if (process_set != 0) arena = state->arena;
    }
    // Without the mutex: handlers of signals run meanwhile, and may call this interface.
    auto transport = std::make_unique<cc::TcpTransport>(
        std::move(listeners), std::string(reinterpret_cast<const char*>(secret), secret_bytes));
    auto group = std::make_unique<cc::Group>(cc::make_topology(rank, std::move(table)), std::move(transport), timeout,
                                             start_timeout, sockets, std::move(arena), single_copy != 0);
    group->warn_after(stall_warning);
    group->add_by_host(by_host != 0);
    const Locked state;
    require(state->engines.count(process_set) == 0, "the engine is initialised already");
    if (process_set != 0 && state->engines.count(0) == 0)
      throw cc::Failure(cc::Fault::closed, "the engine was shut down while a process set connected");
    if (process_set == 0) state->arena = group->arena();
    if (!state->recorder) state->recorder = std::make_shared<cc::Recorder>();
    if (process_set == 0) state->recorder->register_rank(rank, size, group->topology().peers[rank].host_name);
    const auto made =
        std::make_shared<cc::Engine>(std::move(group), state->recorder, process_set, state->external_transports);
    made->use(static_cast<cc::Semantics>(semantics));
    state->engines[process_set] = made;
    state->counters.push_back(made->counters());
    static const int watching = pthread_atfork(nullptr, nullptr, note_fork);
    static_cast<void>(watching);
    state->owner = getpid();
  });
}

int32_t cc_use_external_transport(int32_t device, cc_start start, cc_test test) {
  return guarded([&] {
    const Locked state;
    require((start == nullptr) == (test == nullptr), "an external transport has both functions");
    require(device >= 0 && device < static_cast<int>(cc::Device::count), "unknown device");
    state->external_transports->use(static_cast<cc::Device>(device), start, test);
  });
}

int32_t cc_check_peers(int32_t process_set) {
  return guarded([&] { engine_of(process_set)->check_peers(); });
}

int32_t cc_give_up(int32_t rank) {
  return guarded([&] {
    const Locked state;
    for (const auto& entry : state->engines) entry.second->give_up(rank);
  });
}

void cc_copy(void* target, const void* source, uint64_t bytes) {
  cc::kernels().stream(static_cast<char*>(target), static_cast<const char*>(source), bytes);
  cc::kernels().stream_done();
}

int32_t cc_has_cross_memory(int32_t process_set, int32_t* has) {
  return guarded([&] { *has = engine_of(process_set)->has_cross_memory() ? 1 : 0; });
}

int32_t cc_close(int32_t process_set) {
  return guarded([&] {
    if (forked) return;  // a forked child has nothing to close
    std::map<int32_t, std::shared_ptr<cc::Engine>> closing;
    {
      const Locked state;
      // Tasks stay until they are released: arrays of gathered data may still be in use.
      state->listeners = cc::Listeners();
      if (process_set == 0) {
        closing.swap(state->engines);
        state->arena.reset();
        state->owner = 0;
      } else if (const auto found = state->engines.find(process_set); found != state->engines.end()) {
        closing.insert(std::move(*found));
        state->engines.erase(found);
      }
    }
    end_all(closing);  // when the mutex is free again: their operations may take a while
    keep_totals(closing);
  });
}

int32_t cc_run(const cc_operation* operation) {
  return guarded([&] {
    const std::shared_ptr<cc::Engine> current = engine_of(operation->process_set);
    const auto task = make_task(*operation, current->topology().size);
    return run_task(*current, task);
  });
}

int32_t cc_submit(const cc_operation* operation, cc_way way, int64_t* handle) {
  return guarded([&] {
    const std::shared_ptr<cc::Engine> current = engine_of(operation->process_set);
    const auto task = make_task(*operation, current->topology().size);
    require(way >= cc_queued && way <= cc_among, "unknown way to submit");
    if (way == cc_blocking) {
      run_task(*current, task);
    } else {
      task->blocking = way == cc_alone;
      task->among_others = way == cc_among;
      current->submit(task);
    }
    const Locked state;
    *handle = state->next_handle++;
    state->tasks[*handle] = {task, current};
  });
}

int32_t cc_is_done(int64_t handle, int32_t* done) {
  return guarded([&] { *done = submitted(handle).is_done() ? 1 : 0; });
}

int32_t cc_wait(int64_t handle, double seconds, int32_t* done) {
  return guarded([&] {
    const Submitted found = submitted(handle);
    const WaitClock clock;
    *done = found.wait(seconds) ? 1 : 0;
    return *done ? result_of(*found.task) : 0;
  });
}

int32_t cc_gathered(int64_t handle, void** data, uint64_t* bytes, int64_t* received, int32_t capacity) {
  return guarded([&] {
    const Submitted found = submitted(handle);
    require(found.is_done(), "the operation is not finished");
    const cc::Operation& operation = found.task->operation;
    *data = operation.received_bytes();
    *bytes = operation.gathered_bytes;
    require(operation.received.size() <= static_cast<size_t>(capacity), "the buffer for the rows is too small");
    std::copy(operation.received.begin(), operation.received.end(), received);
  });
}

int32_t cc_release(int64_t handle) {
  return guarded([&] {
    if (forked) return;  // a forked child's memory goes with it
    const Locked state;
    state->tasks.erase(handle);
  });
}

int32_t cc_allocate(uint64_t bytes, int32_t pages, void** address) {
  return guarded([&] {
    require(pages >= 0 && pages < static_cast<int32_t>(cc::Pages::count), "unknown kind of pages");
    const std::shared_ptr<cc::Arena> arena = engine_of(0)->arena();
    *address = arena->allocate(bytes, static_cast<cc::Pages>(pages));
    const Locked state;
    state->blocks[*address] = arena;
  });
}

int32_t cc_free(void* address) {
  return guarded([&] {
    if (forked) return;  // a forked child has no part in the arena
    const Locked state;
    const auto found = state->blocks.find(address);
    if (found == state->blocks.end()) return;
    found->second->release(address);
    state->blocks.erase(found);
  });
}

int32_t cc_record(const char* path) {
  return guarded([&] {
    const Locked state;
    require(state->engines.empty(), "the recorder must be chosen before init()");
    if (state->recorder) state->waited_ns += state->recorder->recording().waited_ns.load();
    state->recorder = std::make_shared<cc::Recorder>(path ? path : "");
  });
}

int32_t cc_events(uint64_t from, void* events, int32_t capacity, int32_t* count, uint64_t* next, uint64_t* waited_ns) {
  return guarded([&] {
    const std::shared_ptr<cc::Recorder> recorder = the_recorder();
    const uint64_t begun = recorder->recording().events.load();
    // What the ring has overwritten is lost; the caller sees it in the numbers.
    const uint64_t oldest = begun > cc::max_events ? begun - cc::max_events + 1 : 1;
    uint64_t at = std::min(std::max(from, oldest), begun + 1);
    *count = 0;
    for (; at <= begun && *count < capacity; ++at) {
      const auto copied =
          recorder->copy(at, static_cast<char*>(events) + static_cast<size_t>(*count) * sizeof(cc::Event));
      if (copied == cc::Recorder::Copied::waits) break;
      if (copied == cc::Recorder::Copied::done) ++*count;
    }
    *next = at;
    *waited_ns = recorder->recording().waited_ns.load();
  });
}

int32_t cc_begin_timeline() {
  return guarded([&] { the_recorder()->begin_timeline(); });
}

int32_t cc_await_events(uint64_t from, double seconds, int32_t* on) {
  return guarded([&] { *on = the_recorder()->wait_for_events(from, seconds) ? 1 : 0; });
}

int32_t cc_end_timeline(double seconds, int32_t* ended, int32_t* of_all) {
  return guarded([&] {
    std::shared_ptr<cc::Engine> current;
    {
      const Locked state;
      const auto found = state->engines.find(0);
      if (found != state->engines.end()) current = found->second;
    }
    *ended = !current || current->wait_until_idle(seconds) ? 1 : 0;
    const std::shared_ptr<cc::Recorder> recorder = the_recorder();
    *of_all = current && recorder->timeline_of_all() ? 1 : 0;
    if (*ended) recorder->end_timeline();
  });
}

int32_t cc_traffic(int32_t process_set, uint64_t* four) {
  return guarded([&] {
    const cc::Traffic& traffic = engine_of(process_set)->traffic();
    four[0] = traffic.exchanges;
    four[1] = traffic.steps;
    four[2] = traffic.messages;
    four[3] = traffic.bytes;
  });
}

int32_t cc_counters(cc_kind_counters* rows, int32_t capacity, int32_t* count) {
  return guarded([&] {
    const Locked state;
    std::map<int32_t, cc::Totals> totals = state->totals;
    for (const auto& counters : state->counters) counters->add_to(&totals[counters->process_set()]);
    *count = 0;
    for (const auto& [process_set, of_set] : totals) {
      for (size_t kind = 0; kind < cc::kinds; ++kind) {
        const cc::KindCounters<uint64_t>& sum = of_set.of_kind[kind];
        if (sum.operations == 0) continue;
        if (*count < capacity)
          rows[*count] = {process_set,    static_cast<int32_t>(kind),
                          sum.operations, sum.failed,
                          sum.bytes,      sum.queue_ns,
                          sum.peers_ns,   sum.hosts_ns,
                          sum.transfer_ns};
        ++*count;
      }
    }
  });
}

int32_t cc_late_ranks(cc_waited_for* rows, int32_t capacity, int32_t* count) {
  return guarded([&] {
    const Locked state;
    std::map<int, uint64_t> waited_for_ns = state->waited_for_ns;
    for (const auto& counters : state->counters) counters->add_to(&waited_for_ns);
    *count = 0;
    for (const auto& [rank, waited_ns] : waited_for_ns) {
      if (*count < capacity) rows[*count] = {rank, 0, waited_ns};
      ++*count;
    }
  });
}

int32_t cc_resources(cc_use* use) {
  return guarded([&] {
    const Locked state;
    const uint64_t waited_now = state->recorder ? state->recorder->recording().waited_ns.load() : 0;
    const cc::Arena::Use arena = state->arena ? state->arena->use() : cc::Arena::Use{};
    *use = {state->waited_ns + waited_now, arena.now, arena.most, arena.all};
  });
}

double cc_core_quota(int64_t process, const char* root) {
  return cc::core_quota(static_cast<pid_t>(process), root);
}

int32_t cc_reduce(int32_t dtype, int32_t reduce, int32_t divisor, double prescale, double postscale, void* out,
                  const void* const* in, int32_t inputs, uint64_t count) {
  return guarded([&] {
    const cc::Reduction reduction{static_cast<cc::DType>(dtype), static_cast<cc::ReduceOp>(reduce), divisor, prescale,
                                  postscale};
    cc::kernels().reduce(reduction, out, in, inputs, count);
  });
}

void cc_hmac_sha256(const uint8_t* key, uint64_t key_bytes, const uint8_t* message, uint64_t message_bytes,
                    uint8_t* digest) {
  const cc::Digest result = cc::hmac_sha256(std::string(reinterpret_cast<const char*>(key), key_bytes),
                                            std::string(reinterpret_cast<const char*>(message), message_bytes));
  std::copy(result.begin(), result.end(), digest);
}
