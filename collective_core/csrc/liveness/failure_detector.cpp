#include "liveness/failure_detector.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "base/interruption.h"
#include "base/validation.h"

namespace cc {
namespace {

constexpr double explanation_s = 0.4;  // a broken connection waits so long for the first cause to be announced
constexpr double drain_s = 1.0;        // for our last words to reach the others
constexpr double frame_rest_s = 2.0;   // for the rest of a frame whose head has arrived
constexpr const char* was_cut_off = " is gone (its connection ended or stood still within a message)";
constexpr size_t max_announcement = 8192;  // bytes of an announcement
// A rank that a signal has stopped for so many looks is lost. Counted in looks: a job that was stopped and continued as
// a whole has missed nothing. Our launchers (launch/stopped.py) end it after 45 s.
constexpr std::chrono::seconds look_interval(5);
constexpr int stopped_looks = 12;
constexpr const char* was_stopped = " has been stopped by a signal for a minute (kill -CONT would have continued it)";

// Whether /proc has the processes by the numbers that this one knows them by: not if it is of another pid namespace.
bool knows_our_numbers() {
  char self[32];
  const ssize_t length = readlink("/proc/self", self, sizeof self);
  return length > 0 && std::string(self, static_cast<size_t>(length)) == std::to_string(getpid());
}

// How often the process at the other end of a local socket has run, if a signal has stopped it (state T; a debugger's
// are t); otherwise empty.
std::string runs_of_stopped(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0 || !knows_our_numbers()) return {};
  std::ifstream file("/proc/" + std::to_string(peer.pid) + "/status");
  std::string text;
  std::getline(file, text, '\0');
  const size_t runs = text.find("\nvoluntary_ctxt_switches:");
  return text.find("\nState:\tT") == std::string::npos || runs == std::string::npos ? "" : text.substr(runs);
}

struct Announcement {  // payload of a failure frame
  int32_t fault;
  int32_t blamed;
  int32_t ranks[max_blamed];
  char text[failure_text];
};

Failure failure_from(int fault, const int32_t* ranks, int blamed, const char* text, int size) {
  std::vector<int> known(ranks, ranks + std::min(std::max(blamed, 0), max_blamed));
  known.erase(std::remove_if(known.begin(), known.end(), [=](int rank) { return rank < 0 || rank >= size; }),
              known.end());
  return {fault_of(fault), std::string(text, strnlen(text, failure_text)), known};
}

template <class Record>
void fill(Record* record, const Failure& failure) {
  record->fault = static_cast<int32_t>(failure.fault);
  record->blamed = static_cast<int32_t>(std::min(failure.ranks.size(), size_t(max_blamed)));
  std::copy_n(failure.ranks.begin(), record->blamed, record->ranks);
  std::strncpy(record->text, failure.what(), failure_text - 1);
  record->text[failure_text - 1] = '\0';
}

}  // namespace

FailureDetector::FailureDetector(const Topology& topology, Transport& transport, Connections& connections,
                                 ControlBlock& control)
    : topology_(topology), transport_(transport), connections_(connections), control_(control) {}

RankCell* FailureDetector::cell_of(int rank) const {
  const std::vector<int>& local = topology_.local_ranks();
  const auto found = std::find(local.begin(), local.end(), rank);
  return found == local.end() ? nullptr : &control_.cells[found - local.begin()];
}

bool FailureDetector::has_left(int rank) const {
  const RankCell* cell = cell_of(rank);
  return cell ? cell->left.load(std::memory_order_acquire) != 0 : left_.count(rank) != 0;
}

void FailureDetector::throw_if_recorded() {
  const FailureRecord& record = control_.failure;
  if (record.state.load(std::memory_order_acquire) == 2) {
    throw failure_from(record.fault, record.ranks, record.blamed, record.text, topology_.size);
  }
  if (leaving_) throw departure_of(topology_.rank);
}

void FailureDetector::check(const std::set<int>& mid_frame) {
  check_host();
  check_control(mid_frame);
}

void FailureDetector::check_waiting_for(int rank, const Signal& signal, uint32_t target) {
  check();
  // In this order: it may have raised the signal, and left, since we looked.
  if (has_left(rank) && !has_reached(signal, target)) throw_if_left(rank);
}

void FailureDetector::throw_if_left(int rank) {
  if (!has_left(rank)) return;
  throw_if_recorded();  // since the last look: it leaves because of that
  throw departure_of(rank);
}

bool FailureDetector::is_waiting(int rank, uint32_t sequence) const {
  const auto found = waiting_.find(rank);
  // One that waits in a later exchange has done its part in this one: what it said then may be with somebody else.
  return found != waiting_.end() && static_cast<int32_t>(found->second.sequence - sequence) >= 0;
}

bool FailureDetector::is_waiting(int rank, uint32_t sequence, double seconds) const {
  if (!is_waiting(rank, sequence)) return false;
  return Deadline::Clock::now() - waiting_.at(rank).told < std::chrono::duration<double>(seconds);
}

Failure FailureDetector::departure_of(int rank) const {
  return {Fault::peer_lost, topology_.describe(rank) + " has shut its engine down while others wait for it", {rank}};
}

void FailureDetector::check_host() {
  if (is_interrupted()) interrupt();
  throw_if_interrupted();
  throw_if_recorded();
  const bool looks = Deadline::Clock::now() - looked_ >= look_interval;
  if (looks) looked_ = Deadline::Clock::now();
  for (auto& entry : connections_.local) {
    if (left_.count(entry.first)) continue;
    if (looks) {
      auto& [runs, times] = stopped_[entry.first];
      const std::string now = runs_of_stopped(entry.second.get());
      times = now.empty() ? 0 : now == runs ? times + 1 : 1;
      runs = now;
      if (times >= stopped_looks)
        throw Failure(Fault::peer_lost, topology_.describe(entry.first) + was_stopped, {entry.first});
    }
    pollfd state{entry.second.get(), POLLRDHUP, 0};
    if (poll(&state, 1, 0) <= 0) continue;
    throw_if_recorded();  // it may have announced a failure and then ended: the announcement is the cause
    if (!has_left(entry.first)) {
      throw Failure(Fault::peer_lost, topology_.describe(entry.first) + " died (its process ended without a word)",
                    {entry.first});
    }
    left_.insert(entry.first);
  }
}

void FailureDetector::throw_if_interrupted() const {
  if (!interrupted_) return;
  throw Failure(Fault::interrupted, topology_.describe(topology_.rank) + " was interrupted by a signal",
                {topology_.rank});
}

bool FailureDetector::is_alive(int rank) const {
  pollfd state{connections_.local.at(rank).get(), POLLRDHUP, 0};
  return poll(&state, 1, 0) == 0;
}

void FailureDetector::check_control(const std::set<int>& mid_frame) {
  std::vector<PollEntry> states;
  std::vector<int> ranks;
  for (auto& entry : connections_.control) {
    if (left_.count(entry.first) || mid_frame.count(entry.first)) continue;
    states.push_back({entry.second.get(), PollEvent::receive});
    ranks.push_back(entry.first);
  }
  if (!transport_.poll(states, 0)) return;
  for (size_t i = 0; i < states.size(); ++i) {
    const bool ended = states[i].ready && read_frames(ranks[i], *connections_.control.at(ranks[i]));
    if (ended && !left_.count(ranks[i])) lost(ranks[i], mid_frame);
  }
}

bool FailureDetector::read_frames(int rank, Connection& connection) {
  for (;;) {
    Frame frame{};
    const ptrdiff_t got = connection.peek(&frame, sizeof frame);
    if (got < 0) return true;
    if (got < static_cast<ptrdiff_t>(sizeof frame) || is_of_exchange(frame.type)) return false;
    receive_rest(rank, &frame, sizeof frame);
    handle_frame(rank, frame);
  }
}

void FailureDetector::receive_rest(int rank, void* bytes, size_t n) {
  Connection& connection = *connections_.control.at(rank);
  const Deadline limit(frame_rest_s);
  std::vector<PollEntry> waiting{{&connection, PollEvent::receive}};
  char* at = static_cast<char*>(bytes);
  while (n > 0) {
    const ptrdiff_t got = connection.receive(at, n);
    if (got < 0) throw Failure(Fault::peer_lost, topology_.describe(rank) + was_cut_off, {rank});
    if (got == 0 && !transport_.poll(waiting, nap_ms)) {
      if (is_interrupted()) interrupt();
      throw_if_interrupted();
      if (limit.passed()) throw Failure(Fault::timeout, topology_.describe(rank) + was_cut_off, {rank});
    }
    at += got;
    n -= static_cast<size_t>(got);
  }
}

void FailureDetector::handle_frame(int rank, const Frame& frame) {
  if (frame.type == FrameType::shutdown) {
    left_.insert(rank);
    return;
  }
  if (frame.type == FrameType::waiting && frame.length == 0) {
    waiting_[rank] = {frame.sequence, Deadline::Clock::now()};
    return;
  }
  Announcement announcement{};
  if (frame.type != FrameType::failure || frame.length != sizeof announcement) {
    throw Failure(Fault::internal, topology_.describe(rank) + " sent a frame that this version does not know", {rank});
  }
  static_assert(sizeof announcement <= max_announcement, "an announcement must fit into a socket buffer");
  receive_rest(rank, &announcement, sizeof announcement);
  throw failure_from(announcement.fault, announcement.ranks, announcement.blamed, announcement.text, topology_.size);
}

void FailureDetector::lost(int rank, const std::set<int>& mid_frame) {
  const Deadline limit(explanation_s);
  while (!limit.passed()) {
    check_host();
    for (auto& entry : connections_.control) {
      // Also that of `rank`: it may have been a data connection that ended, with the reason waiting here.
      if (!left_.count(entry.first) && !mid_frame.count(entry.first)) read_frames(entry.first, *entry.second);
    }
    poll(nullptr, 0, 10);
  }
  throw_if_left(rank);
  throw Failure(Fault::peer_lost,
                topology_.describe(rank) + " is gone (its connection ended: the process died, was killed or shut down)",
                {rank});
}

void FailureDetector::record(const Failure& failure) {
  FailureRecord& record = control_.failure;
  uint32_t nothing = 0;
  if (record.state.compare_exchange_strong(nothing, 1, std::memory_order_acq_rel)) {
    fill(&record, failure);
    record.state.store(2, std::memory_order_release);
  }
}

void FailureDetector::announce(const Failure& failure) {
  record(failure);
  if (announced_) return;
  announced_ = true;
  Announcement announcement{};
  fill(&announcement, failure);
  const Frame frame{FrameType::failure, 0, sizeof announcement};
  std::string bytes(reinterpret_cast<const char*>(&frame), sizeof frame);
  bytes.append(reinterpret_cast<const char*>(&announcement), sizeof announcement);
  // A peer whose buffer stays full is not reading, and will see the connection end.
  std::map<int, size_t> sent;
  bool all_sent = false;
  for (const Deadline limit(drain_s); !all_sent && !limit.passed(); all_sent || poll(nullptr, 0, 1)) {
    all_sent = true;
    for (auto& entry : connections_.control) {
      size_t& done = sent[entry.first];
      if (muted_.count(entry.first) || done == bytes.size()) continue;
      const ptrdiff_t n = entry.second->send(bytes.data() + done, bytes.size() - done);
      done = n < 0 ? bytes.size() : done + static_cast<size_t>(n);
      all_sent = all_sent && done == bytes.size();
    }
  }
  for (const auto& [rank, done] : sent) {
    if (done > 0 && done < bytes.size()) mute(rank);
  }
}

void FailureDetector::send_shutdown() {
  if (RankCell* mine = cell_of(topology_.rank)) mine->left.store(1, std::memory_order_release);
  const Frame frame{FrameType::shutdown, 0, 0};
  for (auto& entry : connections_.control) {
    if (!muted_.count(entry.first)) static_cast<void>(entry.second->send(&frame, sizeof frame));
  }
}

void FailureDetector::drain() {
  char unread[4096];  // that somebody waits, say: nobody is here any more to whom it matters
  for (const Deadline limit(drain_s); !limit.passed(); poll(nullptr, 0, 1)) {
    const bool heard = std::all_of(connections_.control.begin(), connections_.control.end(), [&](const auto& entry) {
      while (entry.second->receive(unread, sizeof unread) > 0 && !limit.passed()) continue;
      return entry.second->is_delivered();
    });
    if (heard) return;
  }
}

}  // namespace cc
