// How the ranks come to run the same operation next: asked in an exchange, or several where their orders differ.
#include <algorithm>
#include <chrono>

#include "engine.h"
#include "mismatch.h"

namespace cc {
namespace {

constexpr auto between_looks =
    std::chrono::milliseconds(20);  // between checks for failures while waiting for a submission
// The time before a stall is warned of, so often: then none of several threads is expected to submit anything more.
constexpr double standstill = 20.0;

// What travels with the header: a small tensor (of a broadcast, the root's), the splits of an alltoall, an objection.
struct Payload {
  const void* bytes;
  uint32_t length;
};
Payload payload_of(const Operation& operation, int rank, const Layout& layout) {
  const Header& header = operation.header;
  if (header.objects) {
    return {operation.objection.data(),
            static_cast<uint32_t>(std::min(operation.objection.size(), layout.payload_bytes))};
  }
  if (header.kind == Kind::alltoall) {
    return {operation.splits.data(), static_cast<uint32_t>(operation.splits.size() * sizeof(int64_t))};
  }
  const bool within_reach = has_tensor(header.kind) && header.device != Device::gpu_memory;
  const bool sends = within_reach && (header.kind != Kind::broadcast || header.root == rank);
  if (!sends || header.bytes() > layout.inline_bytes) return {nullptr, 0};
  return {operation.input, static_cast<uint32_t>(header.bytes())};
}

}  // namespace

void Engine::ask(Task& task, Deadline& deadline) {
  group_->set_current(&task.operation);
  Header& header = task.operation.header;
  const Payload payload = payload_of(task.operation, topology().rank, group_->layout());
  header.inline_bytes = payload.length;
  if (header.kind == Kind::allreduce) {
    header.input_place = group_->arena()->place_of(task.operation.input, header.bytes());
    header.output_place = group_->arena()->place_of(task.operation.output, header.bytes());
  }
  {
    const Lock lock(mutex_);
    const bool nothing_else = queue_.empty() || (queue_.size() == 1 && queue_.front().get() == &task);
    header.stuck = header.stuck || (task.blocking && nothing_else && !several_callers_);
  }
  header.timeline = process_set_ == 0 && recorder_->timeline_is_on() ? 1 : 0;
  exchange_.run(&header, payload.bytes, deadline);
  headers_.resize(static_cast<size_t>(topology().size));
  for (int r = 0; r < topology().size; ++r) headers_[r] = group_->slot(header.sequence, r);
  if (header.timeline) recorder_->note_timelines(headers_);
  task.operation.contributors = joined_.update(headers_);
}

void Engine::join(Task& task, Deadline& deadline) {
  for (;;) {
    deadline.extend();
    ask(task, deadline);
    const int active = task.operation.contributors;
    if (active == 0) break;
    if (compare(headers_).verdict != Verdict::agreed) continue;
    const auto is_active = [](const Header* header) { return header->kind != Kind::join; };
    Ghost ghost(**std::find_if(headers_.begin(), headers_.end(), is_active), topology().size);
    ghost.operation.contributors = active;
    transfer(ghost.operation, deadline);
  }
  task.operation.received = {joined_.take_last()};
}

void Engine::agree(std::shared_ptr<Task>& task, Deadline& deadline) {
  group_->liveness().throw_if_recorded();
  for (;;) {
    ask(*task, deadline);
    const Agreement agreement = compare(headers_);
    switch (agreement.verdict) {
      case Verdict::agreed:
        return;
      case Verdict::disagreed: {
        Failure failure(task->operation.header.objects ? Fault::invalid : Fault::mismatch,
                        explain_disagreement(headers_, topology()), dissenters(headers_));
        failure.one_name = agreement.one_name;
        throw failure;
      }
      case Verdict::reorder:
        task = find_submitted(*headers_[agreement.first], agreement.first, task, deadline);
        break;
    }
  }
}

std::shared_ptr<Task> Engine::find_submitted(const Header& wanted, int first, const std::shared_ptr<Task>& task,
                                             Deadline& deadline) {
  if (task->operation.header.name_hash == wanted.name_hash) return task;
  Lock lock(mutex_);
  for (;;) {
    std::shared_ptr<Task> awaited = task->blocking ? task : nullptr;
    for (const auto& candidate : queue_) {
      if (candidate->operation.header.name_hash == wanted.name_hash) return candidate;
      if (!awaited && candidate->blocking) awaited = candidate;
    }
    if (closing_ || (awaited && all_callers_wait(deadline))) {
      // Nobody will submit it before what a caller waits for is done: that is asked for in the next exchange. If it is
      // not to be had either, every rank reports the disagreement.
      if (!awaited) awaited = task;
      awaited->operation.header.stuck = 1;
      return awaited;
    }
    changed_.wait_for(lock, between_looks);
    lock.unlock();
    group_->liveness().check();
    warn_of_disagreement(wanted, deadline);
    if (deadline.passed()) {
      throw Failure(Fault::timeout,
                    topology().describe(topology().rank) + " did not submit '" + wanted.name + "', which rank " +
                        std::to_string(first) + " runs next, within the time that COLLECTIVE_TIMEOUT sets",
                    {topology().rank});
    }
    lock.lock();
  }
}

bool Engine::all_callers_wait(const Deadline& deadline) const {
  if (!several_callers_) return true;
  return group_->warn_after() > 0 && deadline.waited() >= standstill * group_->warn_after();
}

void Engine::warn_of_disagreement(const Header& wanted, Deadline& deadline) const {
  if (!group_->is_warning_due(deadline)) return;
  std::vector<int> served;  // whose operation goes first; they warn of those who do not come
  for (int rank = 0; rank < topology().size; ++rank) {
    if (headers_[rank]->name_hash == wanted.name_hash) served.push_back(rank);
  }
  if (group_->is_first_here(served)) group_->warn(": " + explain_disagreement(headers_, topology()), deadline);
}

}  // namespace cc
