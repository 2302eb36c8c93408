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
    : group_(group),
      topology_(group.topology()),
      own_steps_(plan_dissemination(topology_.host, topology_.host_count())) {}

void HostNegotiation::still_waiting(const Deadline& deadline) {
  if (!announced_ && deadline.waited() >= announce_after_s) announce_waiting();
  send();
}

void HostNegotiation::fill_slots(Deadline& deadline) {
  HostMemory& memory = group_.memory();
  uint32_t* leads = memory.leads(sequence_);
  for (const int rank : topology_.local_ranks()) leads[rank] = static_cast<uint32_t>(rank);
  const size_t max_payload = memory.layout().payload_bytes;
  StepContent content;
  content.pack = [&](size_t step, std::vector<char>* bytes) {
    std::vector<const Header*> headers;
    for (const int rank : ranks_of(own_steps_[step].sends)) headers.push_back(memory.header_of(sequence_, rank));
    encode_headers(headers, bytes);
  };
  content.take = [&](size_t /*step*/, const FromHost& from, const std::vector<char>& bytes) {
    const std::vector<int> ranks = ranks_of(from.hosts);
    std::vector<Header*> slots;
    std::vector<size_t> found;
    slots.reserve(ranks.size());
    for (const int rank : ranks) slots.push_back(memory.slot(sequence_, rank));
    if (!decode_headers(bytes, sequence_, topology_.size, max_payload, slots, &found)) return false;
    for (size_t i = 0; i < ranks.size(); ++i) leads[ranks[i]] = static_cast<uint32_t>(ranks[found[i]]);
    return true;
  };
  content.max_bytes = [&](size_t /*step*/, const FromHost& from) {
    return max_encoded_bytes(ranks_of(from.hosts).size(), max_payload);
  };
  run(content, deadline);
  traffic_.exchanges += 1;
  traffic_.steps += own_steps_.size();
}

void HostNegotiation::run_steps(uint32_t sequence, const std::vector<DisseminationStep>& steps,
                                const StepContent& content, Deadline& deadline) {
  begin(sequence, FrameType::data, steps);
  try {
    run(content, deadline);
  } catch (const Failure&) {
    give_up();
    throw;
  }
}

void HostNegotiation::run(const StepContent& content, Deadline& deadline) {
  content_ = &content;
  size_t wanted = 0;
  for (size_t step = 0; step < steps_->size(); ++step) {
    start(step);
    const size_t first = wanted;
    wanted += (*steps_)[step].from.size();
    move_until(wanted, false, deadline);
    for (size_t i = first; i < wanted; ++i) {
      if (content.take(step, incoming_[i].from, incoming_[i].body)) continue;
      throw Failure(Fault::internal,
                    topology_.describe(incoming_[i].rank) + " sent what cannot be read (internal error)",
                    {incoming_[i].rank});
    }
  }
  move_until(wanted, true, deadline);
}

void HostNegotiation::give_up() {
  for (const Outgoing& out : outgoing_) {
    if (out.sent > 0) group_.failure_detector().mute(out.rank);
  }
}

void HostNegotiation::begin(uint32_t sequence, FrameType type, const std::vector<DisseminationStep>& steps) {
  sequence_ = sequence;
  type_ = type;
  steps_ = &steps;
  announced_ = false;
  known_hosts_.assign(topology_.hosts.size(), true);
  outgoing_.clear();
  frames_.clear();
  incoming_.clear();
  for (size_t step = 0; step < steps.size(); ++step) {
    for (const FromHost& from : steps[step].from) {
      Incoming incoming;
      incoming.step = step;
      incoming.from = from;
      incoming.rank = topology_.leader_of(from.host);
      incoming.connection = group_.connections().control.at(incoming.rank).get();
      incoming_.push_back(std::move(incoming));
      mark(from.hosts, false);
    }
  }
}

void HostNegotiation::mark(const HostRange& range, bool known) {
  for (int i = 0; i < range.count; ++i) known_hosts_[(range.first + i) % topology_.host_count()] = known;
}

std::vector<int> HostNegotiation::ranks_of(const HostRange& range) const {
  std::vector<int> ranks;
  for (int i = 0; i < range.count; ++i) {
    const std::vector<int>& of_host = topology_.hosts[(range.first + i) % topology_.host_count()];
    ranks.insert(ranks.end(), of_host.begin(), of_host.end());
  }
  return ranks;
}

void HostNegotiation::start(size_t step) {
  if ((*steps_)[step].to.empty()) return;
  Frame frame{type_, sequence_, 0};
  std::vector<char>& bytes = frames_.emplace_back(sizeof frame);
  content_->pack(step, &bytes);
  frame.length = bytes.size() - sizeof frame;
  std::memcpy(bytes.data(), &frame, sizeof frame);
  for (const int host : (*steps_)[step].to) {
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
      if (type_ == FrameType::data) group_.note_progress(deadline);
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
                         : incoming.body.data() + incoming.body_got;
  const size_t left = in_head ? sizeof incoming.frame - incoming.frame_got : incoming.body.size() - incoming.body_got;
  const ptrdiff_t n = incoming.connection->receive(target, left);
  if (n < 0) group_.failure_detector().lost(incoming.rank, mid_frame());
  (in_head ? incoming.frame_got : incoming.body_got) += static_cast<size_t>(n);
  incoming.ready = n > 0;
  if (n == 0 || static_cast<size_t>(n) < left) return n > 0;
  if (in_head) {
    if (!is_of_exchange(incoming.frame.type)) {
      group_.failure_detector().handle_frame(incoming.rank, incoming.frame);
      group_.failure_detector().throw_if_left(incoming.rank);
      incoming.frame_got = 0;
      return true;
    }
    if (incoming.frame.type != type_ || incoming.frame.sequence != sequence_ ||
        incoming.frame.length > content_->max_bytes(incoming.step, incoming.from)) {
      throw Failure(Fault::internal, topology_.describe(incoming.rank) + " is out of step (internal error)",
                    {incoming.rank});
    }
    incoming.body.resize(incoming.frame.length);
    if (incoming.frame.length > 0) return true;
  }
  mark(incoming.from.hosts, true);
  incoming.received = true;
  return true;
}

void HostNegotiation::wait(size_t wanted, Deadline& deadline) {
  std::vector<PollEntry> waiting;
  waiting.reserve(incoming_.size() + outgoing_.size());
  for (const Incoming& in : incoming_) waiting.push_back({in.received ? nullptr : in.connection, PollEvent::receive});
  for (const Outgoing& out : outgoing_) waiting.push_back({out.connection, PollEvent::send});
  if (group_.transport().poll(waiting, steps_->size() > 1 ? nap_of_many_ms : nap_ms)) {
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
