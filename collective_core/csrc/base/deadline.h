// A point on the monotonic clock that a wait must not pass. `extend` restarts it when progress was made, so that a long
// transfer over a slow link is not taken for a stall.
#pragma once

#include <chrono>
#include <cstdint>

namespace cc {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Deadline(double seconds) : seconds_(seconds) { extend(); }
  // `now`: nanoseconds of CLOCK_MONOTONIC, for who has just looked at it.
  Deadline(double seconds, int64_t now) : seconds_(seconds) { begin(Clock::time_point(std::chrono::nanoseconds(now))); }

  void extend() { begin(Clock::now()); }
  bool passed() const { return Clock::now() >= end_; }
  // A wait that depends on a peer's own wait gets more time, so that the peer's more exact message arrives first.
  bool passed_by(double grace_seconds) const {
    return Clock::now() >=
           end_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(grace_seconds));
  }
  // Whether the wait has lasted for so long without progress, and as long as the last time that this was true.
  bool is_warning_due(double seconds) {
    const double waited = since(started_);
    if (seconds <= 0 || waited < seconds || (warned_ != started_ && since(warned_) < waited / 2)) return false;
    warned_ = Clock::now();
    return true;
  }
  double waited() const { return since(started_); }
  double seconds() const { return seconds_; }

 private:
  void begin(Clock::time_point now) {
    started_ = warned_ = now;
    end_ = started_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds_));
  }
  static double since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

  double seconds_;
  Clock::time_point started_, warned_;
  Clock::time_point end_;
};

}  // namespace cc
