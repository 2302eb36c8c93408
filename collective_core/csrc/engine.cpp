#include "engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "collectives.h"
#include "mismatch.h"

namespace cc {
namespace {

constexpr auto look_around =
    std::chrono::milliseconds(20);  // between checks for failures while waiting for a submission

// Small payloads travel with the header: all of an allreduce or an allgather, the root's of a broadcast.
uint32_t inline_bytes_of(const Header& header, int rank, size_t limit) {
  if (header.kind == Kind::barrier || header.bytes() > limit) return 0;
  if (header.kind == Kind::broadcast && header.root != rank) return 0;
  return static_cast<uint32_t>(header.bytes());
}

}  // namespace

Engine::Engine(std::unique_ptr<Group> group) : group_(std::move(group)), exchange_(*group_) {}

Engine::~Engine() {
  {
    Lock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
    changed_.wait(lock, [this] { return !busy_; });  // ends: the running operation has a deadline
    for (const auto& task : queue_)
      settle(*task, Failure(Fault::closed, "the engine was shut down before this operation ran"));
    queue_.clear();
    changed_.notify_all();
  }
  if (worker_.joinable()) worker_.join();
  group_->liveness().say_goodbye();
}

void Engine::run(const std::shared_ptr<Task>& task) {
  task->blocking = true;
  Lock lock(mutex_);
  if (busy_ || !queue_.empty()) {
    lock.unlock();
    submit(task);
    lock.lock();
    changed_.wait(lock, [&] { return task->done; });
    return;
  }
  if (closing_) return settle(*task, Failure(Fault::closed, "the engine is shutting down"));
  busy_ = true;
  lock.unlock();
  perform(task);
  lock.lock();
  busy_ = false;
  changed_.notify_all();
}

void Engine::submit(const std::shared_ptr<Task>& task) {
  const Lock lock(mutex_);
  if (closing_) return settle(*task, Failure(Fault::closed, "the engine is shutting down"));
  queue_.push_back(task);
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  changed_.notify_all();
}

bool Engine::is_done(const Task& task) {
  const Lock lock(mutex_);
  return task.done;
}

bool Engine::wait(const Task& task, double seconds) {
  Lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] { return task.done; });
}

void Engine::work() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closing_ || (!queue_.empty() && !busy_); });
    if (closing_) return;
    busy_ = true;
    std::shared_ptr<Task> task = queue_.front();
    lock.unlock();
    task = perform(task);
    lock.lock();
    const auto position = std::find(queue_.begin(), queue_.end(), task);
    if (position != queue_.end()) queue_.erase(position);
    busy_ = false;
    changed_.notify_all();
  }
}

std::shared_ptr<Task> Engine::perform(const std::shared_ptr<Task>& task) {
  std::shared_ptr<Task> current = task;
  try {
    if (!stopped_.empty()) {
      throw Failure(Fault::peer_lost, "the engine stopped after an earlier failure: " + stopped_, stopped_ranks_);
    }
    Deadline deadline(group_->timeout());
    current = agree(task, deadline);
    transfer(current->operation, deadline);
    const Lock lock(mutex_);
    current->done = true;
  } catch (const Failure& failure) {
    if (is_fatal(failure.fault) && stopped_.empty()) {
      group_->liveness().spread(failure);
      stopped_ = failure.what();
      stopped_ranks_ = failure.ranks;
    }
    const Lock lock(mutex_);
    settle(*current, failure);
  } catch (const std::exception& error) {
    const Failure failure(Fault::internal, topology().describe(topology().rank) + ": " + error.what(),
                          {topology().rank});
    if (stopped_.empty()) {
      group_->liveness().spread(failure);
      stopped_ = failure.what();
      stopped_ranks_ = failure.ranks;
    }
    const Lock lock(mutex_);
    settle(*current, failure);
  }
  return current;
}

void Engine::settle(Task& task, const Failure& failure) {
  task.fault = failure.fault;
  task.error = task.operation.describe() + ": " + failure.what();
  task.ranks = failure.ranks;
  task.done = true;
}

std::shared_ptr<Task> Engine::agree(std::shared_ptr<Task> task, Deadline& deadline) {
  group_->liveness().throw_if_recorded();
  for (;;) {
    Header& header = task->operation.header;
    header.inline_bytes = inline_bytes_of(header, topology().rank, group_->layout().inline_bytes);
    {
      const Lock lock(mutex_);
      const bool nothing_else = queue_.empty() || (queue_.size() == 1 && queue_.front() == task);
      header.stuck = header.stuck || (task->blocking && nothing_else);
    }
    exchange_.run(&header, task->operation.input, deadline);

    headers_.resize(static_cast<size_t>(topology().size));
    for (int r = 0; r < topology().size; ++r) headers_[r] = group_->slot(header.sequence, r);
    const Agreement agreement = compare(headers_);
    switch (agreement.verdict) {
      case Verdict::agreed:
        return task;
      case Verdict::disagreed:
        throw Failure(Fault::mismatch, explain_disagreement(headers_, topology()), dissenters(headers_));
      case Verdict::reorder:
        task = find_submitted(*headers_[agreement.first], agreement.first, task, deadline);
        break;
    }
  }
}

std::shared_ptr<Task> Engine::find_submitted(const Header& wanted, int first, const std::shared_ptr<Task>& task,
                                             const Deadline& deadline) {
  if (task->operation.header.name_hash == wanted.name_hash) return task;
  Lock lock(mutex_);
  for (;;) {
    bool caller_waits = false;
    for (const auto& candidate : queue_) {
      if (candidate->operation.header.name_hash == wanted.name_hash) return candidate;
      caller_waits = caller_waits || candidate->blocking;
    }
    if (caller_waits || closing_) {
      // Nobody will submit it: say so in the next exchange, and every rank reports the disagreement.
      task->operation.header.stuck = 1;
      return task;
    }
    changed_.wait_for(lock, look_around);
    lock.unlock();
    group_->liveness().check();
    if (deadline.passed()) {
      throw Failure(Fault::timeout,
                    topology().describe(topology().rank) + " did not submit '" + wanted.name + "', which rank " +
                        std::to_string(first) + " runs next, within the time that COLLECTIVE_TIMEOUT sets",
                    {topology().rank});
    }
    lock.lock();
  }
}

void Engine::transfer(Operation& operation, Deadline& deadline) {
  const Header& header = operation.header;
  const size_t limit = group_->layout().inline_bytes;
  switch (header.kind) {
    case Kind::barrier:
      return;
    case Kind::allreduce: {
      if (header.count == 0) return;
      if (header.bytes() <= limit || topology().size == 1) {
        std::vector<const void*> sources;
        for (const int r : topology().order) sources.push_back(Group::payload(group_->slot(header.sequence, r)));
        if (topology().size == 1) sources[0] = operation.input;
        return kernels().reduce(reduction_of(header, topology().size), operation.output, sources.data(),
                                topology().size, header.count);
      }
      return topology().host_count() == 1 ? allreduce_local(*group_, operation, deadline)
                                          : allreduce_ring(*group_, operation, deadline);
    }
    case Kind::broadcast: {
      const bool root = header.root == topology().rank;
      if (header.count == 0 || topology().size == 1) return;
      if (header.bytes() <= limit) {
        if (!root)
          std::memcpy(operation.output, Group::payload(group_->slot(header.sequence, header.root)), header.bytes());
        return;
      }
      uint64_t chunk = 0;
      return broadcast_bytes(*group_, header.root, operation.input, operation.output, header.bytes(), &chunk, deadline);
    }
    case Kind::allgather:
      return gather(operation, headers_, deadline);
  }
}

void Engine::gather(Operation& operation, const std::vector<const Header*>& headers, Deadline& deadline) {
  const size_t size = headers.size();
  std::vector<uint64_t> offsets(size + 1, 0);
  bool all_inline = true;
  operation.first_dims.resize(size);
  for (size_t r = 0; r < size; ++r) {
    offsets[r + 1] = offsets[r] + headers[r]->bytes();
    operation.first_dims[r] = headers[r]->dims[0];
    all_inline = all_inline && headers[r]->inline_bytes == headers[r]->bytes();
  }
  operation.gathered_bytes = offsets[size];
  operation.gathered.reset(new char[std::max<uint64_t>(operation.gathered_bytes, 1)]);
  if (!all_inline) return allgather_bytes(*group_, operation.input, operation.gathered.get(), offsets, deadline);
  for (size_t r = 0; r < size; ++r) {
    std::memcpy(operation.gathered.get() + offsets[r], Group::payload(const_cast<Header*>(headers[r])),
                headers[r]->bytes());
  }
}

}  // namespace cc
