// The last operations of this process, in a ring of fixed records: what the timeline draws, and what is left to read
// after a crash when the ring lies in a file. A record is written in place, before and after its operation runs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "base/operation.h"

namespace cc {

int64_t monotonic_ns();

enum class EventState : uint32_t { none = 0, running = 1, done = 2, failed = 3 };

// Python reads this layout too (observe/recorder.py, and of a rank that hangs hostside/stall.py). Times: nanoseconds of
// CLOCK_MONOTONIC.
struct Event {
  std::atomic<uint32_t> state;
  int32_t process_set;
  std::atomic<uint64_t> number;  // from 1
  int64_t queued_ns;             // handed to the engine
  int64_t started_ns;
  int64_t agreed_ns;  // all ranks were there and wanted the same; 0: not yet, or nobody wants to know
  int64_t ended_ns;
  uint64_t bytes;
  uint8_t kind, dtype, reduce, padding[5];
  char name[name_bytes];

  void describe(const Header& header);
  // The ranks will do another operation than the one that this rank had begun with.
  void become(const Header& header, int64_t when_queued);
  void agree() { agreed_ns = monotonic_ns(); }
  // Returns when that was.
  int64_t end(bool well);
};
static_assert(sizeof(Event) == 136, "observe/recorder.py reads this layout");

constexpr uint64_t max_events = 8192;  // about 1 MiB
// So many new ones wake who collects them: at the latest when half of the ring is new.
constexpr uint64_t many_events = max_events / 4;

struct Recording {
  char magic[8];
  int32_t rank, size;
  int64_t pid;
  int64_t monotonic_ns, real_ns;    // of one moment, to turn the first clock into the second
  std::atomic<uint64_t> events;     // begun so far; event n lies at (n - 1) % max_events
  std::atomic<uint64_t> waited_ns;  // that callers have spent waiting for collectives
  char host_name[64];
  Event ring[max_events];
};

class Recorder {
 public:
  // An empty path: memory only. Throws Failure(invalid) when the file cannot be made.
  explicit Recorder(const std::string& path = {});
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;
  ~Recorder();

  void register_rank(int rank, int size, const std::string& host_name);
  // The event keeps its place in the ring until its end, however many others come meanwhile: numbers that would lie
  // there are left out.
  Event& begin(const Header& header, int process_set, int64_t queued_ns, int64_t started_ns);
  void add_wait(int64_t nanoseconds) { recording_->waited_ns.fetch_add(static_cast<uint64_t>(nanoseconds)); }
  const Recording& recording() const { return *recording_; }
  // Copies event `number` unless it is not finished yet (waits) or has been overwritten (lost).
  enum class Copied { done, waits, lost };
  Copied copy(uint64_t number, void* event) const;

  // While a timeline is on, somebody collects the events.
  void begin_timeline();
  void end_timeline();
  bool timeline_is_on() const { return timeline_.load(std::memory_order_relaxed); }
  // Of an exchange in which this rank said that its timeline is on: what all ranks said.
  void note_timelines(const std::vector<const Header*>& headers);
  // Whether in some exchange since it began, all ranks had one. All ranks know the same once both have ended the
  // operations that they submitted before.
  bool timeline_of_all() const { return timeline_of_all_.load(std::memory_order_relaxed); }
  // Waits until many events are new from number `from` on, at most so long. Returns whether the timeline is still on.
  bool wait_for_events(uint64_t from, double seconds);

 private:
  Recording* recording_;
  std::mutex mutex_;
  std::condition_variable changed_;  // the timeline has ended, or there are many new events
  std::atomic<bool> timeline_{false}, timeline_of_all_{false};
};

}  // namespace cc
