// Knows who is alive and tells everyone when something went wrong.
//
// Inside a host a failure is a record in shared memory that every wait looks at. Between hosts the leaders send each
// other frames on their control connections. Whoever meets a failure first writes the sentence that all ranks will
// show.
#pragma once

#include <atomic>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/errors.h"
#include "base/topology.h"
#include "transport/seam.h"
#include "transport/shm/layout.h"

namespace cc {

enum class FrameType : uint32_t { none = 0, headers = 1, failure = 2, shutdown = 3, waiting = 4, data = 5 };
// Of an exchange: left for those who take part in it.
inline bool is_of_exchange(FrameType type) {
  return type == FrameType::headers || type == FrameType::data;
}

// Precedes everything on a control connection.
struct Frame {
  FrameType type;
  uint32_t sequence;
  uint64_t length;  // bytes that follow
};

class FailureDetector {
 public:
  FailureDetector(const Topology& topology, Transport& transport, Connections& connections, ControlBlock& control);

  // Throws the announced failure, or Failure(peer_lost) when a peer died. Costs a few system calls: for naps, not for
  // spins. Control connections of ranks in `mid_frame` are not at the head of a frame and are left alone.
  void check(const std::set<int>& mid_frame = {});
  // As check, but also when `rank` has shut down in good order before `signal`, which it raises, reached `target`.
  void check_waiting_for(int rank, const Signal& signal, uint32_t target);
  // Throws the failure that a rank of this host or another leader has announced, if any. Costs two loads.
  void throw_if_recorded();
  // The part of check() that reads no control connection: announced failures and ranks of this host.
  void check_host();
  // Whether a rank of this host still runs. Throws nothing.
  bool is_alive(int rank) const;
  // The connection to `rank` ended under our hands. Waits a moment for a better explanation, then throws.
  [[noreturn]] void lost(int rank, const std::set<int>& mid_frame = {});
  // Acts on a frame that is not of an exchange; its header has been read. Throws if it announces a failure.
  void handle_frame(int rank, const Frame& frame);
  // For a rank that we need something of, after its frames.
  void throw_if_left(int rank);
  // Whether this leader has said that it waits for others in this exchange, or in a later one.
  bool is_waiting(int rank, uint32_t sequence) const;
  // The same, and said so less than `seconds` ago.
  bool is_waiting(int rank, uint32_t sequence, double seconds) const;

  // From any thread: the first failure that is recorded is what all ranks of this host find in their next look.
  void record(const Failure& failure);
  // Announces a fatal failure to every rank that we can send to, once.
  void announce(const Failure& failure);
  void send_shutdown();
  // Before the connections are closed: waits until the others' systems have all that we said (the last headers of an
  // operation, an announcement, the shutdown frame), at most a second. A connection that is closed over unread data is
  // reset, and what has not been delivered is dropped.
  void drain();
  // From another thread: ends the operation that this rank is waiting in.
  void leave() { leaving_ = true; }
  // The same after a signal that wants this rank's waits to end.
  void interrupt() { interrupted_ = true; }
  // A frame to `rank` was left unfinished: nothing more can be said on that connection.
  void mute(int rank) { muted_.insert(rank); }

 private:
  void throw_if_interrupted() const;
  void check_control(const std::set<int>& mid_frame);
  // Takes the frames that have come, up to one of an exchange. Returns whether the connection has ended.
  bool read_frames(int rank, Connection& connection);
  // Of a frame that has begun to arrive.
  void receive_rest(int rank, void* bytes, size_t n);
  bool has_left(int rank) const;
  Failure departure_of(int rank) const;
  RankCell* cell_of(int rank) const;

  const Topology& topology_;
  Transport& transport_;
  Connections& connections_;
  ControlBlock& control_;
  std::set<int> left_;  // remote leaders that have shut down, local ranks whose hang-up has been seen
  std::set<int> muted_;
  struct Wait {
    uint32_t sequence;
    Deadline::Clock::time_point told;
  };
  std::map<int, Wait> waiting_;  // by leader, the exchange in which it last said so
  Deadline::Clock::time_point looked_;
  std::map<int, std::pair<std::string, int>> stopped_;  // by rank of this host: runs_of_stopped, looks in a row
  bool announced_ = false;
  std::atomic<bool> leaving_{false}, interrupted_{false};
};

}  // namespace cc
