// Runs collectives one at a time, in the same order on every rank.
//
// A blocking call runs in the caller's thread when nothing is queued, and no external transport's functions could meet
// the handlers of signals there. Others are queued and run by one worker thread, which is started by the first of them
// and sleeps when the queue is empty. Ranks may submit named operations in different orders: when an exchange shows
// different names, rank 0's operation goes first (or that of a rank whose caller is blocked in it) and the others move
// theirs to the front, waiting for it to be submitted if need be. A rank whose callers wait and will submit nothing
// more says so, and what then cannot be brought together is a disagreement.
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/counters.h"
#include "base/operation.h"
#include "base/recorder.h"
#include "group/group.h"
#include "negotiation/exchange.h"
#include "negotiation/join.h"
#include "negotiation/negotiation.h"
#include "transport/external/external_transport.h"

namespace cc {

struct Task {
  // For another run of what has run well, once nobody else has it any more.
  void renew() {
    done = false;
    queued_ns = monotonic_ns();
  }

  Operation operation;
  bool blocking = false;               // a caller waits for it and submits nothing else meanwhile
  bool among_others = false;           // whose callers, which the engine does not know yet, may submit something
  std::atomic<bool> done{false};       // the last to be written, so that who sees it needs no lock
  int64_t queued_ns = monotonic_ns();  // it is handed over as soon as it is made
  Fault fault = Fault::none;
  std::string error;
  std::vector<int> ranks;  // to blame for the error
  bool one_name = false;   // as of Failure
};

class Engine {
 public:
  // external_transports: for tensors that the engine does not move itself.
  explicit Engine(std::unique_ptr<Group> group, std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>(),
                  int process_set = 0,
                  std::shared_ptr<ExternalTransports> external_transports = std::make_shared<ExternalTransports>());
  ~Engine();
  // Waits a moment for what is under way, and runs nothing any more. Returns the failure that has stopped this engine,
  // if one has, with ranks of the job.
  std::optional<Failure> end();
  // After end(): why this rank leaves, a failure with ranks of the job. An engine that has not failed itself tells it
  // to others that wait for this rank.
  void leave_because(const Failure& failure);

  // From any thread: ends what waits for this rank of the job, which is gone although its connection does not say so.
  void give_up(int global_rank);
  // Before anything runs.
  void use(Semantics semantics) { semantics_ = semantics; }
  // Operation::header is complete but for sequence, inline_bytes, blocked and timeline. Failures are in the task;
  // thrown is only the refusal of a name that is in flight. run returns when it was done, in nanoseconds of
  // monotonic_ns().
  int64_t run(const std::shared_ptr<Task>& task);
  void submit(const std::shared_ptr<Task>& task);
  bool is_done(const Task& task);
  // Throws what ended the engine meanwhile, or would end its next operation, unless one is under way, which looks
  // itself.
  void check_peers();
  // Returns is_done after at most `seconds`.
  bool wait(Task& task, double seconds);
  // Whether, after at most `seconds`, all that was submitted is done.
  bool wait_until_idle(double seconds);
  bool has_cross_memory() const { return group_->cross_memory().is_available(); }
  const Topology& topology() const { return group_->topology(); }
  const std::shared_ptr<Arena>& arena() const { return group_->arena(); }
  const Traffic& traffic() const { return exchange_.traffic(); }
  const std::shared_ptr<Counters>& counters() const { return counters_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  void work();
  // How an operation went: the failure is still to be settled, because that needs mutex_.
  struct Outcome {
    std::shared_ptr<Task> task;
    std::optional<Failure> failure;
    int64_t ended_ns;
  };
  // Runs `task` or, when another one goes first, that.
  Outcome perform(const std::shared_ptr<Task>& task, int64_t started_ns);
  void enqueue(const std::shared_ptr<Task>& task);      // with mutex_ held
  void refuse_name_in_use(const Header& header) const;  // with mutex_ held; only under Horovod's semantics
  bool collect(const Task& task);                       // with mutex_ held: whether it is done, which frees its name
  // With mutex_ held: the outcome's task is done and no longer queued.
  void conclude(const Outcome& outcome);
  // Publishes the operation and learns what the others want: headers_ and `contributors`.
  void ask(Task& task, const Negotiation& negotiation, Deadline& deadline);
  // Until all want the same, which may be another task of this rank's than the one it came with; a join when all join.
  void negotiate(std::shared_ptr<Task>& task, Deadline& deadline);
  // As a rank that has joined, in what the latest exchange has agreed on.
  void run_as_joined(int contributors, Deadline& deadline);
  std::shared_ptr<Task> first_in_queue() const;  // with mutex_ held: a join only where there is nothing else
  // A first proposal that was not agreed on, until something is.
  struct Disagreement {
    std::shared_ptr<Task> came_with;
    int64_t ran_ns;  // by threads that do not wait here, and from when on they must run to be awaited
    Deadline idle;
  };
  // With mutex_ held: all that this rank can propose.
  std::vector<Submission> submitted(const std::shared_ptr<Task>& came_with) const;
  // While what goes first is still to be submitted here. Throws when the time is over.
  void check_in_time(const Negotiation& negotiation, Deadline& deadline) const;
  void transfer(Operation& operation, Deadline& deadline);
  // As scales_before_transfer says; `run_as_joined` is the other side of it.
  void scale_and_transfer(Operation& operation, Deadline& deadline);
  void forget_locations();  // of tensors in the arena, in headers_: something else is transferred
  int& note_caller();       // with mutex_ held: how often this thread waits here
  // With mutex_ held: this thread runs something on the connections, which are for one at a time, until the other call.
  void begin_to_run();
  void end_run();
  bool may_use_external_transport(const Header& header) const;
  void settle_queue();  // with mutex_ held: what is still queued when this engine ends
  // With mutex_ held, while a caller waits: whether there is nobody else who will submit something. Of several threads
  // each may still bring what the other ranks want, so that is believed only of those that have ended or not run for a
  // while, and after a long time.
  bool all_callers_wait(Disagreement* disagreement, const Deadline& deadline) const;
  // Seconds in which a stall would be warned of so often, within the operation's timeout.
  double patience(double warnings, const Deadline& deadline) const;
  // With mutex_ held: nanoseconds that the callers' threads which live and do not wait here have run; -1: there is
  // none.
  int64_t others_ran_ns() const;
  void settle(Task& task, const Failure& failure);  // with mutex_ held
  std::vector<int> global_ranks(const std::vector<int>& ranks) const;
  // What the system refused this rank, as a failure.
  Failure internal(const std::exception& error) const;
  // Tells the other ranks, and stops this engine.
  void stop(const Failure& failure);

  std::unique_ptr<Group> group_;
  std::shared_ptr<Recorder> recorder_;
  int process_set_;
  std::shared_ptr<Counters> counters_;
  std::shared_ptr<ExternalTransports> external_transports_;
  Exchange exchange_;
  std::vector<const Header*> headers_;     // of the latest exchange, by rank
  std::vector<Header> unlocated_headers_;  // what they point to instead after forget_locations
  JoinedRanks joined_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Task>> queue_;
  const Task* in_caller_ = nullptr;  // which a caller runs in its own thread
  // Threads that have asked for something, and how often each waits here now. The main thread starts those that will.
  std::map<pid_t, int> callers_{{getpid(), 0}};
  Semantics semantics_ = Semantics::engine;
  std::unordered_map<uint64_t, const Task*> claimed_names_;  // of what was submitted and not collected
  bool busy_ = false;
  std::thread::id runner_;  // while it is busy
  bool closing_ = false;
  std::optional<Failure> stopped_;  // the first fatal failure
  std::thread worker_;
};

}  // namespace cc
