#include "negotiation/host_negotiation.h"

#include <algorithm>
#include <cstring>

#include "negotiation/header_codec.h"

namespace cc {
namespace {

// Who waits for a waiting rank gives it time to find out, and to say, whom it waits for in turn.
constexpr double leader_grace_s = 1.0;  // beyond the deadline
// Of waiting, before the others are told. Far more than an exchange takes, and well within the grace.
constexpr double announce_after_s = 0.5;
// Looks at the connections before it sleeps in poll(), about 0.3 us each: longer than a message takes in a rack.
constexpr size_t receives_on_own_core = 100;
// How late a death may be noticed. A look at all control connections takes the longer the more there are.
constexpr int nap_of_many_ms = 100;

}  // namespace

HostNegotiation::HostNegotiation(Group& group)
    : group_(group), topology_(group.topology()), steps_(plan_dissemination(topology_.host, topology_.host_count())) {}

void HostNegotiation::still_waiting(const Deadline& deadline) {
  if (!announced_ && deadline.waited() >= announce_after_s) announce_waiting();
  send();
}

void HostNegotiation::fill_slots(Deadline& deadline) {
  size_t wanted = 0;
  for (const DisseminationStep& step : steps_) {
    start(step);
    wanted += step.from.size();
    move_until(wanted, false, deadline);
  }
  move_until(wanted, true, deadline);
  traffic_.exchanges += 1;
  traffic_.steps += steps_.size();
}

void HostNegotiation::give_up() {
  for (const Outgoing& out : outgoing_) {
    if (out.sent > 0) group_.failure_detector().mute(out.rank);
  }
}

void HostNegotiation::begin(uint32_t sequence) {
  sequence_ = sequence;
  announced_ = false;
  known_hosts_.assign(topology_.hosts.size(), false);
  known_hosts_[topology_.host] = true;
  outgoing_.clear();
  frames_.clear();
  incoming_.clear();
  for (const DisseminationStep& step : steps_) {
    for (const FromHost& from : step.from) {
      Incoming incoming;
      incoming.from = from;
      incoming.rank = topology_.leader_of(from.host);
      incoming.connection = group_.connections().control.at(incoming.rank).get();
      incoming_.push_back(std::move(incoming));
    }
  }
}

std::vector<int> HostNegotiation::ranks_of(const HostRange& range) const {
  std::vector<int> ranks;
  for (int i = 0; i < range.count; ++i) {
    const std::vector<int>& of_host = topology_.hosts[(range.first + i) % topology_.host_count()];
    ranks.insert(ranks.end(), of_host.begin(), of_host.end());
  }
  return ranks;
}

void HostNegotiation::start(const DisseminationStep& step) {
  std::vector<const Header*> slots;
  for (const int rank : ranks_of(step.sends)) slots.push_back(group_.memory().slot(sequence_, rank));
  Frame frame{FrameType::headers, sequence_, 0};
  std::vector<char>& bytes = frames_.emplace_back(sizeof frame);
  encode_headers(slots, &bytes);
  frame.length = bytes.size() - sizeof frame;
  std::memcpy(bytes.data(), &frame, sizeof frame);
  for (const int host : step.to) {
    const int rank = topology_.leader_of(host);
    outgoing_.push_back({rank, group_.connections().control.at(rank).get(), &bytes, true, 0});
  }
}

void HostNegotiation::move_until(size_t wanted, bool all_sent, Deadline& deadline) {
  // Each try looks at all of them.
  const size_t most = group_.wait_policy().spins >= own_core.spins ? receives_on_own_core : 1,
               tries = most / std::max<size_t>(wanted, 1);
  for (size_t idle = 0;;) {
    for (size_t i = 0; i < wanted; ++i) incoming_[i].ready = true;
    bool moved = send();
    for (Incoming& incoming : incoming_) {
      while (incoming.ready && !incoming.received && receive(incoming)) moved = true;
    }
    const bool here = std::all_of(incoming_.begin(), incoming_.begin() + static_cast<ptrdiff_t>(wanted),
                                  [](const Incoming& incoming) { return incoming.received; });
    const auto must_go = [](const Outgoing& out) { return out.needed || out.sent > 0; };
    if (here && (!all_sent || std::none_of(outgoing_.begin(), outgoing_.end(), must_go))) return;
    if (moved) {
      idle = 0;
    } else if (++idle >= tries) {
      wait(wanted, deadline);
    }
  }
}

bool HostNegotiation::send() {
  bool moved = false;
  std::set<const Connection*> busy;  // connections with an earlier frame that is not through
  for (auto out = outgoing_.begin(); out != outgoing_.end();) {
    ptrdiff_t n = 0;
    if (!busy.count(out->connection))
      n = out->connection->send(out->bytes->data() + out->sent, out->bytes->size() - out->sent);
    if (n < 0 && out->needed) {
      // A peer that announced a failure and left cannot be sent to, but can still be read: what it said comes first.
      const auto awaited = [&](const Incoming& in) { return in.rank == out->rank && !in.received; };
      if (std::none_of(incoming_.begin(), incoming_.end(), awaited))
        group_.failure_detector().lost(out->rank, mid_frame());
      n = 0;
    }
    if (n > 0) {
      moved = true;
      out->sent += static_cast<size_t>(n);
    }
    const bool through = out->sent == out->bytes->size();
    if (through) {
      traffic_.messages += 1;
      traffic_.bytes += out->sent;
    }
    if (through || n < 0) {
      out = outgoing_.erase(out);
    } else {
      busy.insert(out->connection);
      ++out;
    }
  }
  return moved;
}

// Returns whether something came.
bool HostNegotiation::receive(Incoming& incoming) {
  const bool in_head = incoming.frame_got < sizeof incoming.frame;
  char* target = in_head ? reinterpret_cast<char*>(&incoming.frame) + incoming.frame_got
                         : incoming.encoded.data() + incoming.encoded_got;
  const size_t left =
      in_head ? sizeof incoming.frame - incoming.frame_got : incoming.encoded.size() - incoming.encoded_got;
  const ptrdiff_t n = incoming.connection->receive(target, left);
  if (n < 0) group_.failure_detector().lost(incoming.rank, mid_frame());
  (in_head ? incoming.frame_got : incoming.encoded_got) += static_cast<size_t>(n);
  incoming.ready = n > 0;
  if (n == 0 || static_cast<size_t>(n) < left) return n > 0;
  if (in_head) {
    if (incoming.frame.type != FrameType::headers) {
      group_.failure_detector().handle_frame(incoming.rank, incoming.frame);
      group_.failure_detector().throw_if_left(incoming.rank);
      incoming.frame_got = 0;
      return true;
    }
    const size_t most = max_encoded_bytes(ranks_of(incoming.from.hosts).size(), group_.memory().layout().payload_bytes);
    if (incoming.frame.sequence != sequence_ || incoming.frame.length == 0 || incoming.frame.length > most) {
      throw Failure(Fault::internal, topology_.describe(incoming.rank) + " is out of step (internal error)",
                    {incoming.rank});
    }
    incoming.encoded.resize(incoming.frame.length);
    return true;
  }
  store(incoming);
  incoming.received = true;
  return true;
}

void HostNegotiation::store(const Incoming& incoming) {
  std::vector<Header*> slots;
  for (const int rank : ranks_of(incoming.from.hosts)) slots.push_back(group_.memory().slot(sequence_, rank));
  if (!decode_headers(incoming.encoded, sequence_, topology_.size, group_.memory().layout().payload_bytes, slots)) {
    throw Failure(Fault::internal,
                  topology_.describe(incoming.rank) + " sent headers that cannot be read (internal error)",
                  {incoming.rank});
  }
  for (int i = 0; i < incoming.from.hosts.count; ++i) {
    known_hosts_[(incoming.from.hosts.first + i) % topology_.host_count()] = true;
  }
}

void HostNegotiation::wait(size_t wanted, Deadline& deadline) {
  std::vector<PollEntry> waiting;
  waiting.reserve(incoming_.size() + outgoing_.size());
  for (const Incoming& in : incoming_) waiting.push_back({in.received ? nullptr : in.connection, PollEvent::receive});
  for (const Outgoing& out : outgoing_) waiting.push_back({out.connection, PollEvent::send});
  if (group_.transport().poll(waiting, steps_.size() > 1 ? nap_of_many_ms : nap_ms)) {
    for (size_t i = 0; i < incoming_.size(); ++i) incoming_[i].ready = waiting[i].ready;
    return;
  }
  group_.memory().control().leader_naps.fetch_add(1, std::memory_order_relaxed);
  group_.failure_detector().check(mid_frame());
  if (!announced_ && deadline.waited() >= announce_after_s) announce_waiting();
  std::vector<int> late = missing();
  group_.warn_if_due(late, deadline);
  if (!deadline.passed_by(leader_grace_s)) return;
  if (late.empty()) late = unexplained(wanted, deadline);
  if (!late.empty()) group_.timed_out(late, deadline);
}

// Everyone is here, but what they sent is not: whoever said last that it waits has until its own deadline to say for
// whom.
std::vector<int> HostNegotiation::unexplained(size_t wanted, const Deadline& deadline) const {
  std::vector<int> late;
  for (const auto& entry : group_.connections().control) {
    if (group_.failure_detector().is_waiting(entry.first, sequence_, deadline.seconds() + leader_grace_s)) return {};
  }
  for (size_t i = 0; i < wanted; ++i) {
    if (!incoming_[i].received) late.push_back(incoming_[i].rank);
  }
  for (size_t i = 0; late.empty() && i < outgoing_.size(); ++i) late.push_back(outgoing_[i].rank);
  return late;
}

void HostNegotiation::announce_waiting() {
  announced_ = true;
  const Frame frame{FrameType::waiting, sequence_, 0};
  const char* head = reinterpret_cast<const char*>(&frame);
  const std::vector<char>& bytes = frames_.emplace_back(head, head + sizeof frame);
  for (auto& entry : group_.connections().control) {
    outgoing_.push_back({entry.first, entry.second.get(), &bytes, false, 0});
  }
}

std::vector<int> HostNegotiation::missing() const {
  std::vector<int> ranks;
  for (int host = 0; host < topology_.host_count(); ++host) {
    const int rank = topology_.leader_of(host);
    if (!known_hosts_[host] && !group_.failure_detector().is_waiting(rank, sequence_)) ranks.push_back(rank);
  }
  return ranks;
}

std::set<int> HostNegotiation::mid_frame() const {
  std::set<int> ranks;
  for (const Incoming& in : incoming_) {
    if (!in.received && in.frame_got > 0) ranks.insert(in.rank);
  }
  return ranks;
}

}  // namespace cc
