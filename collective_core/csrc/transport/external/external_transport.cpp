#include "transport/external/external_transport.h"

#include <sched.h>

#include "base/errors.h"

namespace cc {
namespace {

// Polls for the end of a transfer, each of which also moves it on, between checks of the other ranks.
constexpr int polls_between_checks = 64;
constexpr size_t error_text = 1024;
constexpr int32_t waits_for_turn = 2;  // of cc_test

}  // namespace

void ExternalTransports::use(Device device, cc_start start, cc_test test) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (start) known_[device] = {start, test};
  if (!start) known_.erase(device);
  uint32_t devices = 0;
  for (const auto& entry : known_) devices |= 1U << static_cast<unsigned>(entry.first);
  devices_ = devices;
}

std::unique_ptr<ExternalTransport> ExternalTransports::of(Device device, int process_set) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = known_.find(registered_as(device));
  if (found == known_.end()) return nullptr;
  return std::make_unique<ExternalTransport>(process_set, found->second.first, found->second.second);
}

void ExternalTransport::fail(const Topology& topology, const char* error) {
  throw Failure(Fault::internal, topology.describe(topology.rank) + ": " + error, {topology.rank});
}

uint64_t ExternalTransport::propose(const Topology& topology) const {
  cc_transfer asked{};
  asked.process_set = process_set_;
  asked.kind = static_cast<int32_t>(Kind::barrier);
  char error[error_text] = "";
  if (start_(&asked, error, sizeof error) != 0) fail(topology, error);
  return asked.order;
}

void ExternalTransport::withdraw(uint64_t order) const {
  cc_transfer asked{};
  asked.process_set = process_set_;
  asked.kind = static_cast<int32_t>(Kind::barrier);
  asked.order = order;
  char error[error_text] = "";  // of no interest: another one is on its way
  start_(&asked, error, sizeof error);
}

void ExternalTransport::run(const Topology& topology, cc_transfer transfer, Deadline& deadline,
                            const std::function<void()>& check) const {
  transfer.process_set = process_set_;
  char error[error_text] = "";
  if (start_(&transfer, error, sizeof error) != 0) fail(topology, error);
  for (int polls = 1;; ++polls) {
    const int32_t state = test_(transfer.process_set, error, sizeof error);
    if (state < 0) fail(topology, error);
    // Those before it have deadlines of their own.
    if (state == waits_for_turn) deadline.extend();
    if (state > 0 && state != waits_for_turn) break;
    if (polls % polls_between_checks == 0) {
      check();
      if (deadline.passed())
        throw Failure(Fault::timeout, "the data has not moved within the time that COLLECTIVE_TIMEOUT sets");
    }
    sched_yield();
  }
  deadline.extend();
}

}  // namespace cc
