#include "base/recorder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

#include "base/errors.h"
#include "base/fd.h"

namespace cc {
namespace {

int64_t nanoseconds_of(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

bool is_running(const Event& event) {
  return event.state.load(std::memory_order_relaxed) == static_cast<uint32_t>(EventState::running);
}

}  // namespace

int64_t monotonic_ns() {
  return nanoseconds_of(CLOCK_MONOTONIC);
}

void Event::describe(const Header& header) {
  bytes = header.bytes();
  kind = static_cast<uint8_t>(header.kind);
  dtype = static_cast<uint8_t>(header.dtype);
  reduce = static_cast<uint8_t>(header.reduce);
  std::memcpy(name, header.name, name_bytes);
}

void Event::become(const Header& header, int64_t when_queued) {
  describe(header);
  queued_ns = when_queued;
}

int64_t Event::end(bool well) {
  const int64_t now = monotonic_ns();
  ended_ns = now;
  state.store(static_cast<uint32_t>(well ? EventState::done : EventState::failed), std::memory_order_release);
  return now;
}

Recorder::Recorder(const std::string& path) {
  // Memory that has a name: who looks for the cause of a hang finds it among the mappings (hostside/stall.py).
  const Fd file(path.empty() ? static_cast<int>(syscall(SYS_memfd_create, "collective_flight", MFD_CLOEXEC))
                             : ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  const bool is_sized = file && ftruncate(file.get(), sizeof(Recording)) == 0;  // not where files may not be so large
  if (!is_sized && !path.empty())
    throw Failure(Fault::invalid, "cannot write the flight recorder " + path + ": " + std::strerror(errno));
  const int flags = is_sized ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* memory = mmap(nullptr, sizeof(Recording), PROT_READ | PROT_WRITE, flags, is_sized ? file.get() : -1, 0);
  if (memory == MAP_FAILED)
    throw Failure(Fault::internal, std::string("no memory for the recorder: ") + std::strerror(errno));
  recording_ = static_cast<Recording*>(memory);  // all zeros: no events
}

Recorder::~Recorder() {
  munmap(recording_, sizeof(Recording));
}

void Recorder::register_rank(int rank, int size, const std::string& host_name) {
  recording_->rank = rank;
  recording_->size = size;
  recording_->pid = getpid();
  recording_->monotonic_ns = monotonic_ns();
  recording_->real_ns = nanoseconds_of(CLOCK_REALTIME);
  std::strncpy(recording_->host_name, host_name.c_str(), sizeof recording_->host_name - 1);
  std::memcpy(recording_->magic, "ccfr0001", sizeof recording_->magic);
}

Event& Recorder::begin(const Header& header, int process_set, int64_t queued_ns, int64_t started_ns) {
  uint64_t number = recording_->events.fetch_add(1) + 1;
  while (is_running(recording_->ring[(number - 1) % max_events])) number = recording_->events.fetch_add(1) + 1;
  Event& event = recording_->ring[(number - 1) % max_events];
  event.state.store(static_cast<uint32_t>(EventState::none), std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // who sees anything of what follows sees this, too: copy()
  event.process_set = process_set;
  event.number.store(number, std::memory_order_relaxed);
  event.queued_ns = queued_ns;
  event.started_ns = started_ns;
  event.agreed_ns = event.ended_ns = 0;
  event.describe(header);
  event.state.store(static_cast<uint32_t>(EventState::running), std::memory_order_release);
  if (number % many_events == 0 && timeline_is_on()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }
  return event;
}

Recorder::Copied Recorder::copy(uint64_t number, void* target) const {
  const Event& event = recording_->ring[(number - 1) % max_events];
  const uint32_t state = event.state.load(std::memory_order_acquire);
  const bool finished =
      state == static_cast<uint32_t>(EventState::done) || state == static_cast<uint32_t>(EventState::failed);
  const uint64_t found = event.number.load(std::memory_order_relaxed);
  const bool left_out = state == static_cast<uint32_t>(EventState::running) && found < number;
  if (found > number || left_out) return Copied::lost;
  if (found < number || !finished) return Copied::waits;
  std::memcpy(target, static_cast<const void*>(&event), sizeof event);
  std::atomic_thread_fence(std::memory_order_acquire);
  const bool same =
      event.state.load(std::memory_order_acquire) == state && event.number.load(std::memory_order_relaxed) == number;
  return same ? Copied::done : Copied::lost;
}

void Recorder::begin_timeline() {
  timeline_of_all_.store(false);
  timeline_.store(true);
}

void Recorder::end_timeline() {
  const std::lock_guard<std::mutex> lock(mutex_);
  timeline_.store(false);
  changed_.notify_all();
}

void Recorder::note_timelines(const std::vector<const Header*>& headers) {
  const auto on = [](const Header* header) { return header->timeline != 0; };
  if (std::all_of(headers.begin(), headers.end(), on)) timeline_of_all_.store(true, std::memory_order_relaxed);
}

bool Recorder::wait_for_events(uint64_t from, double seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    return !timeline_is_on() || recording_->events.load(std::memory_order_relaxed) >= from + many_events;
  });
  return timeline_is_on();
}

}  // namespace cc
