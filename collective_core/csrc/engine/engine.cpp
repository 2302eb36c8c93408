#include "engine/engine.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <utility>

#include "algorithms/collectives.h"
#include "algorithms/selection.h"
#include "base/interruption.h"
#include "base/memory.h"
#include "kernels/exact_floats.h"

namespace cc {
namespace {

constexpr const char* refused_in_handler =
    "a signal handler cannot wait for a collective while the program is inside another one: let it set a flag";
constexpr const char* was_interrupted = "a signal has ended the wait";
constexpr auto shutdown_wait = std::chrono::milliseconds(500);  // for the operation that runs at shutdown

uint64_t key_of(const Header& header) {
  return header.name_hash + static_cast<uint64_t>(header.kind);
}

// Nanoseconds that a thread of this process has run; -1: it has ended. What pthread_getcpuclockid tells, by its number.
int64_t ran_ns(pid_t thread) {
  timespec ran = {};
  const clockid_t clock = static_cast<clockid_t>((~static_cast<unsigned>(thread) << 3) | 6);
  return clock_gettime(clock, &ran) == 0 ? int64_t(1000000000) * ran.tv_sec + ran.tv_nsec : -1;
}

// While a thread waits for an operation.
struct Waiting {
  explicit Waiting(int& count) : count_(count) { ++count_; }
  ~Waiting() { --count_; }
  int& count_;
};

// Whether the data has come with the headers, so that what is left takes no time worth a look at the clock.
bool has_travelled(const Header& header) {
  return header.kind == Kind::allreduce && header.inline_bytes == header.bytes();
}

}  // namespace

Engine::Engine(std::unique_ptr<Group> group, std::shared_ptr<Recorder> recorder, int process_set,
               std::shared_ptr<ExternalTransports> external_transports)
    : group_(std::move(group)),
      recorder_(std::move(recorder)),
      process_set_(process_set),
      counters_(std::make_shared<Counters>(process_set, group_->topology())),
      external_transports_(std::move(external_transports)),
      exchange_(*group_),
      joined_(group_->topology().size) {}

Engine::~Engine() {
  end();
  group_->failure_detector().send_shutdown();
  group_->failure_detector().drain();
}

std::optional<Failure> Engine::end() {
  bool left = false;
  {
    Lock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
    // The operation that runs is of this very thread, which ends it and the rest when the handler is done.
    if (is_in_handler() && busy_ && runner_ == std::this_thread::get_id()) {
      group_->failure_detector().leave();
      return {};
    }
    const auto is_idle = [this] { return !busy_; };
    if (!changed_.wait_for(lock, shutdown_wait, is_idle)) {
      left = true;
      group_->failure_detector().leave();
      changed_.wait(lock, is_idle);
    }
    settle_queue();
  }
  if (worker_.joinable()) worker_.join();
  if (!stopped_ || left) return {};  // that it left is no failure
  return Failure(stopped_->fault, stopped_->what(), global_ranks(stopped_->ranks));
}

void Engine::give_up(int global_rank) {
  for (const Peer& peer : topology().peers) {
    if (peer.global_rank != global_rank) continue;
    group_->failure_detector().record(
        {Fault::peer_lost, topology().describe(peer.rank) + " is gone: the launcher has given it up", {peer.rank}});
  }
}

void Engine::settle_queue() {
  for (const auto& task : queue_)
    settle(*task, Failure(Fault::closed, "the engine was shut down before this operation ran"));
  queue_.clear();
  changed_.notify_all();
}

void Engine::begin_to_run() {
  busy_ = true;
  runner_ = std::this_thread::get_id();
}

void Engine::end_run() {
  busy_ = false;
  if (closing_) settle_queue();  // a handler has called end(), which could not wait for this
  changed_.notify_all();
}

void Engine::leave_because(const Failure& failure) {
  if (stopped_) return;
  std::vector<int> known;  // of the ranks to blame, those that are in this process set
  for (const Peer& peer : topology().peers) {
    const bool blamed = std::find(failure.ranks.begin(), failure.ranks.end(), peer.global_rank) != failure.ranks.end();
    if (blamed) known.push_back(peer.rank);
  }
  stop(Failure(failure.fault, failure.what(), known));
}

int64_t Engine::run(const std::shared_ptr<Task>& task) {
  task->blocking = true;
  Lock lock(mutex_);
  if (is_in_handler()) {
    settle(*task, Failure(Fault::invalid, refused_in_handler));
    return monotonic_ns();
  }
  const Waiting waiting(note_caller());
  const Header& header = task->operation.header;
  if (busy_ || !queue_.empty() || header.kind == Kind::join || may_use_external_transport(header)) {
    enqueue(task);
    bool interrupted = false;
    while (!changed_.wait_for(lock, between_signals, [&] { return task->done.load(); })) {
      lock.unlock();
      if (!interrupted && is_interrupted()) {
        interrupted = true;
        group_->failure_detector().interrupt();  // whoever runs it ends it
      }
      lock.lock();
    }
    if (interrupted) settle(*task, Failure(Fault::interrupted, was_interrupted, {topology().rank}));
    collect(*task);
    return monotonic_ns();
  }
  if (closing_) {
    settle(*task, Failure(Fault::closed, "the engine is shutting down"));
    return monotonic_ns();
  }
  refuse_name_in_use(header);
  begin_to_run();
  in_caller_ = task.get();
  // While it is under way, another thread may submit what the other ranks want first.
  int64_t now = task->queued_ns;
  bool interrupted = false;
  while (!task->done) {
    lock.unlock();
    const Outcome outcome = perform(task, now);
    lock.lock();
    conclude(outcome);
    interrupted = interrupted || (outcome.failure && outcome.failure->fault == Fault::interrupted);
    now = outcome.ended_ns;
  }
  if (interrupted) settle(*task, Failure(Fault::interrupted, was_interrupted, {topology().rank}));
  in_caller_ = nullptr;
  end_run();
  return now;
}

// An external transport's functions are an interpreter's, which would run the handlers of signals in them, where what
// these raise would be lost.
bool Engine::may_use_external_transport(const Header& header) const {
  if (!external_transports_->exist_for(header.device) || !has_tensor(header.kind) || header.unsupported) return false;
  const bool all_travel_inline = header.device != Device::gpu_memory && header.kind != Kind::allgather &&
                                 header.kind != Kind::alltoall &&
                                 header.bytes() <= group_->memory().layout().inline_bytes_of(header.kind);
  return !all_travel_inline && runs_handlers();
}

void Engine::conclude(const Outcome& outcome) {
  Task& task = *outcome.task;
  if (outcome.failure) settle(task, *outcome.failure);
  task.done = true;
  const auto position = std::find(queue_.begin(), queue_.end(), outcome.task);
  if (position != queue_.end()) queue_.erase(position);
  changed_.notify_all();
}

int& Engine::note_caller() {
  static thread_local const auto caller = static_cast<pid_t>(syscall(SYS_gettid));
  const auto known = callers_.find(caller);
  if (known != callers_.end()) return known->second;
  for (auto one = callers_.begin(); one != callers_.end();) one = ran_ns(one->first) < 0 ? callers_.erase(one) : ++one;
  return callers_[caller] = 0;
}

int64_t Engine::others_ran_ns() const {
  int64_t sum = -1;
  for (const auto& [thread, waits] : callers_) {
    const int64_t ran = waits > 0 ? -1 : ran_ns(thread);
    if (ran >= 0) sum = std::max<int64_t>(sum, 0) + ran;
  }
  return sum;
}

void Engine::submit(const std::shared_ptr<Task>& task) {
  const Lock lock(mutex_);
  enqueue(task);
}

void Engine::enqueue(const std::shared_ptr<Task>& task) {
  refuse_name_in_use(task->operation.header);
  if (semantics_ == Semantics::horovod) claimed_names_[key_of(task->operation.header)] = task.get();
  note_caller();
  if (closing_) return settle(*task, Failure(Fault::closed, "the engine is shutting down"));
  queue_.push_back(task);
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  changed_.notify_all();
}

// Until its result is collected, not only until it is done: then all ranks refuse the same calls, however fast each one
// is.
void Engine::refuse_name_in_use(const Header& header) const {
  if (semantics_ != Semantics::horovod || !has_tensor(header.kind) || !header.name[0]) return;
  const bool runs = in_caller_ && key_of(in_caller_->operation.header) == key_of(header);
  if (!runs && claimed_names_.count(key_of(header)) == 0) return;
  throw Failure(Fault::invalid, std::string("an ") + name_of(header.kind) + " with the name '" + header.name +
                                    "' is in flight already: wait for it first, or give this one another name "
                                    "(COLLECTIVE_SEMANTICS=engine runs them one after the other)");
}

bool Engine::collect(const Task& task) {
  if (!task.done || claimed_names_.empty()) return task.done;
  const auto claim = claimed_names_.find(key_of(task.operation.header));
  if (claim != claimed_names_.end() && claim->second == &task) claimed_names_.erase(claim);
  return true;
}

bool Engine::is_done(const Task& task) {
  const Lock lock(mutex_);
  return collect(task);
}

bool Engine::wait(Task& task, double seconds) {
  Lock lock(mutex_);
  if (task.done || seconds <= 0) return collect(task);
  if (is_in_handler()) throw Failure(Fault::invalid, refused_in_handler);
  const Waiting waiting(note_caller());
  const bool was_blocking = std::exchange(task.blocking, !task.among_others);
  changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return task.done.load(); });
  task.blocking = was_blocking;
  return collect(task);
}

bool Engine::wait_until_idle(double seconds) {
  Lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return !busy_ && queue_.empty(); });
}

void Engine::work() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || (!queue_.empty() && !busy_); });
    if (closing_) return;
    begin_to_run();
    const std::shared_ptr<Task> task = first_in_queue();
    lock.unlock();
    const Outcome outcome = perform(task, monotonic_ns());
    lock.lock();
    busy_ = false;
    conclude(outcome);
  }
}

std::shared_ptr<Task> Engine::first_in_queue() const {
  const auto is_other = [](const auto& task) { return task->operation.header.kind != Kind::join; };
  const auto other = std::find_if(queue_.begin(), queue_.end(), is_other);
  return other == queue_.end() ? queue_.front() : *other;
}

Engine::Outcome Engine::perform(const std::shared_ptr<Task>& task, int64_t started_ns) {
  const ExactFloats exact;
  std::shared_ptr<Task> current = task;
  std::optional<Failure> failed;
  Event& event = recorder_->begin(task->operation.header, process_set_, task->queued_ns, started_ns);
  try {
    if (stopped_) {
      const std::string text = std::string("the engine stopped after an earlier failure: ") + stopped_->what();
      throw Failure(Fault::peer_lost, text, stopped_->ranks);
    }
    Deadline deadline(group_->timeout(), started_ns);
    negotiate(current, deadline);
    if (current != task) event.become(current->operation.header, current->queued_ns);
    if (!has_travelled(current->operation.header) || recorder_->timeline_is_on()) event.agree();
    transfer(current->operation, deadline);
  } catch (const Failure& failure) {
    failed = failure;
    if (is_fatal(failure.fault)) stop(failure);
  } catch (const std::exception& error) {
    failed = internal(error);
    stop(*failed);
  }
  group_->set_current(nullptr);
  const int64_t ended_ns = event.end(!failed);
  counters_->add(event, ended_ns, !failed, exchange_.take_waits());
  return {std::move(current), std::move(failed), ended_ns};
}

Failure Engine::internal(const std::exception& error) const {
  return {Fault::internal, topology().describe(topology().rank) + ": " + error.what(), {topology().rank}};
}

void Engine::stop(const Failure& failure) {
  if (stopped_) return;
  const Fault told = failure.fault == Fault::interrupted ? Fault::peer_lost : failure.fault;
  stopped_ = Failure(told, failure.what(), failure.ranks);
  // First: who sees this rank closed looks there for why, and would otherwise take this rank for the one that is lost.
  group_->failure_detector().record(*stopped_);
  // The operation's memory is its caller's again. Others may be as far as to write there, in whatever it has failed.
  group_->cross_memory().close();
  group_->arena()->retire();
  group_->failure_detector().announce(*stopped_);
  group_->cross_memory().wait_for_writes();
}

void Engine::check_peers() {
  Lock lock(mutex_);
  if (busy_ || closing_) return;
  begin_to_run();
  lock.unlock();
  std::optional<Failure> found;
  try {
    if (stopped_) throw Failure(Fault::peer_lost, stopped_->what(), stopped_->ranks);
    group_->failure_detector().check();
  } catch (const Failure& failure) {
    found = failure;
  } catch (const std::exception& error) {
    found = internal(error);
  }
  if (found) stop(*found);
  lock.lock();
  end_run();
  if (found) throw Failure(*found);
}

void Engine::settle(Task& task, const Failure& failure) {
  task.fault = failure.fault;
  task.error = task.operation.describe() + ": " + failure.what();
  task.ranks = global_ranks(failure.ranks);
  task.one_name = failure.one_name;
  task.done = true;
}

std::vector<int> Engine::global_ranks(const std::vector<int>& ranks) const {
  std::vector<int> global;
  global.reserve(ranks.size());
  for (const int rank : ranks) global.push_back(topology().peers[rank].global_rank);
  return global;
}

void Engine::transfer(Operation& operation, Deadline& deadline) {
  const Header& header = operation.header;
  const bool some_joined = operation.contributors != topology().size;
  if (semantics_ == Semantics::horovod) operation.contributors = topology().size;  // what an average divides by
  if (header.kind == Kind::join) operation.received = {joined_.take_last()};
  if (scales_before_transfer(header, some_joined, group_->memory().layout().inline_bytes_of(header.kind)))
    return scale_and_transfer(operation, deadline);
  std::unique_ptr<ExternalTransport> external;
  if (external_transports_->exist_for(header.device)) external = external_transports_->of(header.device, process_set_);
  const DataPhase phase{*group_, operation, headers_, deadline, external.get(), exchange_};
  const Algorithm algorithm = select_algorithm(phase);
  if (algorithm) algorithm(phase);
  // It has been read by those that came first: it is called back while the program does something else.
  if (algorithm == reduce_inline) fetch_to_write(&group_->memory().my_cell().published);
}

void Engine::scale_and_transfer(Operation& operation, Deadline& deadline) {
  const Header& header = operation.header;
  const Reduction reduction = reduction_of(operation);
  const size_t accumulator = accumulator_size_of(header.dtype);
  uint64_t kept = header.count;
  if (header.kind == Kind::reducescatter) {
    const auto rows = static_cast<uint64_t>(header.dims[0]);
    kept = rows_of(rows, topology().rank, topology().size).length * (header.count / rows);
  }
  Operation plain;
  plain.header = without_factors(header);
  plain.contributors = operation.contributors;
  std::unique_ptr<char[]> scaled = memory_for(header.count * accumulator), result = memory_for(kept * accumulator);
  kernels().accumulate(reduction, scaled.get(), true, &operation.input, 1, header.count);
  plain.input = scaled.get();
  plain.output = result.get();
  forget_locations();
  try {
    transfer(plain, deadline);
  } catch (...) {
    static_cast<void>(scaled.release());  // an external transport may still be busy with them (external_transport.h)
    static_cast<void>(result.release());
    throw;
  }
  kernels().finish(reduction, operation.output, result.get(), kept);
}

void Engine::forget_locations() {
  unlocated_headers_.clear();
  for (const Header* header : headers_) unlocated_headers_.push_back(*header);
  for (size_t rank = 0; rank < headers_.size(); ++rank) {
    unlocated_headers_[rank].input_location = unlocated_headers_[rank].output_location = 0;
    unlocated_headers_[rank].attachable = 0;
    headers_[rank] = &unlocated_headers_[rank];
  }
}

}  // namespace cc
