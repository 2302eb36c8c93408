// How the ranks come to run the same operation next: asked in an exchange, or several where their orders differ.
#include <algorithm>
#include <chrono>

#include "engine/engine.h"

namespace cc {
namespace {

constexpr auto between_looks =
    std::chrono::milliseconds(20);  // between checks for failures while waiting for a submission
// The time before a stall is warned of, so often: then nothing more is expected of threads that have run meanwhile, and
// of those that have not. Nothing proves that a thread will never submit anything, so both are long, but shorter than
// the timeout, which ends the engine.
constexpr double standstill = 20.0, idle = 6.0, of_timeout = 0.75;
constexpr double usual_warning_s = 10.0;  // counts where stalls are not warned of

// What travels with the header: a small tensor (of a broadcast, the root's), the splits of an alltoall, why a rank
// cannot run it.
struct Payload {
  const void* bytes;
  uint32_t length;
};
Payload payload_of(const Operation& operation, int rank, const Layout& layout) {
  const Header& header = operation.header;
  if (header.unsupported) {
    return {operation.unsupported_reason.data(),
            static_cast<uint32_t>(std::min(operation.unsupported_reason.size(), layout.payload_bytes))};
  }
  if (header.kind == Kind::alltoall) {
    return {operation.splits.data(), static_cast<uint32_t>(operation.splits.size() * sizeof(int64_t))};
  }
  const bool in_host_memory = has_tensor(header.kind) && header.device != Device::gpu_memory;
  const bool sends = in_host_memory && (header.kind != Kind::broadcast || header.root == rank);
  if (!sends || header.bytes() > layout.inline_bytes_of(header.kind)) return {nullptr, 0};
  return {operation.input, static_cast<uint32_t>(header.bytes())};
}

// Asked only where hosts must agree on it: on one host the ranks find it out together (cross_memory.h).
bool is_attachable(const Operation& operation, Group& group) {
  const Header& header = operation.header;
  const Topology& topology = group.topology();
  const bool matters = is_reduction(header.kind) && header.device != Device::gpu_memory && topology.host_count() > 1 &&
                       topology.local_size() > 1 &&
                       header.bytes() > group.memory().layout().inline_bytes_of(header.kind);
  if (!matters || !group.cross_memory().is_attachable(operation.input, header.bytes())) return false;
  // The sum of a reduce-scatter is formed in memory of the engine's own.
  return header.kind == Kind::reducescatter || group.cross_memory().is_attachable(operation.output, header.bytes());
}

}  // namespace

void Engine::ask(Task& task, const Negotiation& negotiation, Deadline& deadline) {
  group_->set_current(&task.operation);
  Header& header = task.operation.header;
  const Payload payload = payload_of(task.operation, topology().rank, group_->memory().layout());
  header.inline_bytes = payload.length;
  if (is_reduction(header.kind) || header.kind == Kind::allgather)
    header.input_location = group_->arena()->location_of(task.operation.input, header.bytes());
  if (header.kind == Kind::allreduce)
    header.output_location = group_->arena()->location_of(task.operation.output, header.bytes());
  header.attachable = is_attachable(task.operation, *group_) ? 1 : 0;
  {
    const Lock lock(mutex_);
    const bool nothing_else = queue_.empty() || (queue_.size() == 1 && queue_.front().get() == &task);
    header.blocked = negotiation.says(task.blocking && nothing_else && callers_.size() <= 1);
  }
  // Horovod knows how to do without a rank in reductions alone.
  const bool can_do_without = header.kind == Kind::allreduce || !has_tensor(header.kind) || task.operation.inner;
  header.whole = semantics_ == Semantics::horovod && !can_do_without ? 1 : 0;
  header.timeline = process_set_ == 0 && recorder_->timeline_is_on() ? 1 : 0;
  exchange_.run(&header, payload.bytes, deadline);
  headers_.resize(static_cast<size_t>(topology().size));
  for (int r = 0; r < topology().size; ++r) headers_[r] = group_->memory().header_of(header.sequence, r);
  // The slot's cache lines are on their way to the other ranks. Behind this header there is no payload: an allreduce
  // asks header_of for that, and one that is unsupported keeps the slot's header.
  if (header.kind == Kind::allreduce && !header.unsupported) headers_[topology().rank] = &header;
  if (header.timeline) recorder_->note_timelines(headers_);
  task.operation.contributors = joined_.update(headers_);
}

void Engine::run_as_joined(int contributors, Deadline& deadline) {
  const auto is_active = [](const Header* header) { return header->kind != Kind::join; };
  Header wanted = **std::find_if(headers_.begin(), headers_.end(), is_active);
  if (scales_before_transfer(wanted, contributors != topology().size,
                             group_->memory().layout().inline_bytes_of(wanted.kind))) {
    wanted = without_factors(wanted);
    forget_locations();
  }
  NeutralOperation neutral(wanted, topology().size);
  neutral.operation.contributors = contributors;
  try {
    transfer(neutral.operation, deadline);
  } catch (const Failure& failure) {
    if (is_fatal(failure.fault)) throw;  // else it is a mistake of those whose operation it is, and they are told of it
  }
}

void Engine::negotiate(std::shared_ptr<Task>& task, Deadline& deadline) {
  group_->failure_detector().throw_if_recorded();
  Negotiation negotiation(&task->operation.header);
  // Only where the first proposal is not agreed on: copies of shared pointers cost time.
  std::optional<Disagreement> begun;
  for (;;) {
    if (joins(task->operation.header)) deadline.extend();
    ask(*task, negotiation, deadline);
    const Step step = negotiation.after(headers_, topology().rank);
    if (step == Step::run) return;
    if (step == Step::fail) throw disagreement(headers_, topology(), topology().rank, negotiation.agreement.one_name);
    Lock lock(mutex_);
    if (!begun) begun = Disagreement{task, others_ran_ns(), Deadline(patience(idle, deadline))};
    lock.unlock();
    if (step == Step::run_as_joined) run_as_joined(task->operation.contributors, deadline);
    if (step != Step::reorder) deadline.extend();
    lock.lock();
    while (!negotiation.propose(submitted(begun->came_with), closing_,
                                [&] { return all_callers_wait(&*begun, deadline); })) {
      changed_.wait_for(lock, between_looks);
      lock.unlock();
      group_->failure_detector().check();
      check_in_time(negotiation, deadline);
      lock.lock();
    }
    const auto is_mine = [&](const auto& one) { return &one->operation.header == negotiation.mine; };
    const auto mine = std::find_if(queue_.begin(), queue_.end(), is_mine);
    task = mine == queue_.end() ? begun->came_with : *mine;  // which its caller may run without the queue
  }
}

std::vector<Submission> Engine::submitted(const std::shared_ptr<Task>& came_with) const {
  std::vector<Submission> all{{&came_with->operation.header, came_with->blocking}};
  for (const auto& task : queue_) {
    if (task != came_with) all.push_back({&task->operation.header, task->blocking});
  }
  return all;
}

bool Engine::all_callers_wait(Disagreement* disagreement, const Deadline& deadline) const {
  const int64_t ran = others_ran_ns();
  if (ran < 0) return true;
  if (ran != disagreement->ran_ns) disagreement->idle.extend();
  disagreement->ran_ns = ran;
  return disagreement->idle.passed() || deadline.waited() >= patience(standstill, deadline);
}

double Engine::patience(double warnings, const Deadline& deadline) const {
  const double after = group_->warn_after() > 0 ? group_->warn_after() : usual_warning_s;
  return std::min(warnings * after, of_timeout * deadline.seconds());
}

void Engine::check_in_time(const Negotiation& negotiation, Deadline& deadline) const {
  const Header& wanted = *headers_[negotiation.agreement.first];
  if (group_->is_warning_due(deadline)) {
    std::vector<int> served;  // whose operation goes first; they warn of those who do not come
    for (int rank = 0; rank < topology().size; ++rank) {
      if (headers_[rank]->name_hash == wanted.name_hash) served.push_back(rank);
    }
    if (group_->is_first_here(served)) group_->warn(": " + explain_disagreement(headers_, topology()), deadline);
  }
  if (!deadline.passed()) return;
  throw Failure(Fault::timeout,
                topology().describe(topology().rank) + " did not submit '" + wanted.name + "', which rank " +
                    std::to_string(negotiation.agreement.first) +
                    " runs next, within the time that COLLECTIVE_TIMEOUT sets",
                {topology().rank});
}

}  // namespace cc
