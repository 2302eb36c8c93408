#include "transport/seam.h"

#include <utility>

namespace cc {
namespace {

// Of one rank to its partners on all other hosts. A host receives from all of them at once, and the more there are the
// less their exchange saves: of many hosts nearly as many bytes pass each link as on the ring.
constexpr int max_mesh_connections = 64;

template <class End>
void put(std::vector<End>* all, int channel, End end) {
  const auto number = static_cast<size_t>(channel);
  if (all->size() <= number) all->resize(number + 1);
  (*all)[number] = std::move(end);
}

}  // namespace

ConnectionPlan plan_connections(const Topology& t, int sockets) {
  ConnectionPlan plan;
  const auto pair_with = [&](int peer, Purpose purpose) {
    if (peer < t.rank) plan.outgoing.push_back({peer, purpose, 0});
    if (peer > t.rank) plan.incoming.insert({peer, purpose, 0});
  };
  for (const int peer : t.local_ranks()) pair_with(peer, Purpose::local);
  const int hosts = t.host_count();
  if (t.is_leader()) {
    for (int host = 0; host < hosts; ++host) {
      if (host != t.host) pair_with(t.leader_of(host), Purpose::control);
    }
  }
  const bool is_mesh = t.is_even() && (hosts - 1) * sockets <= max_mesh_connections;
  // Each begins with the next host, so that they do not all call the first one at the same time.
  for (int k = 1; k < hosts && t.local_rank < t.channels(); ++k) {
    const int host = (t.host + k) % hosts;
    const int peer = t.hosts[host][t.local_rank];
    const bool is_next = k == 1, is_previous = t.host == (host + 1) % hosts;
    for (int number = 0; number < sockets; ++number) {
      if (is_next || is_mesh) plan.outgoing.push_back({peer, Purpose::data, number});
      if (is_previous || is_mesh) plan.incoming.insert({peer, Purpose::data, number});
    }
  }
  return plan;
}

void Connections::add(const PlannedConnection& planned, bool outgoing, std::unique_ptr<Connection> connection) {
  if (planned.purpose == Purpose::control) {
    control[planned.peer] = std::move(connection);
  } else if (outgoing) {
    add(planned, std::make_unique<StreamSender>(std::move(connection)));
  } else {
    add(planned, std::make_unique<StreamReceiver>(std::move(connection)));
  }
}

void Connections::add(const PlannedConnection& planned, std::unique_ptr<Sender> sender) {
  put(&to[planned.peer], planned.channel, std::move(sender));
}

void Connections::add(const PlannedConnection& planned, std::unique_ptr<Receiver> receiver) {
  put(&from[planned.peer], planned.channel, std::move(receiver));
}

void StreamSender::post(const SegmentHead& head, const void* body, size_t bytes) {
  queue_.push_back({head, body, bytes});
  ++posted_;
}

// Of one segment, so that whoever moves several connections comes to the others.
ptrdiff_t StreamSender::progress() {
  ptrdiff_t moved = 0;
  while (!queue_.empty()) {
    const Posted& first = queue_.front();
    const ptrdiff_t n = connection_->send(&first.head, sizeof first.head, first.body, first.bytes, sent_);
    if (n < 0) return -1;
    if (n == 0) break;
    moved += n;
    sent_ += static_cast<size_t>(n);
    if (sent_ < sizeof first.head + first.bytes) continue;
    sent_ = 0;
    queue_.pop_front();
    ++completed_;
    break;
  }
  return moved;
}

void StreamReceiver::post(void* body, size_t bytes) {
  body_ = static_cast<char*>(body);
  bytes_ = bytes;
}

void StreamReceiver::next() {
  body_ = nullptr;
  got_ = 0;
}

ptrdiff_t StreamReceiver::progress() {
  if (head() && (!body_ || is_completed())) return 0;
  const size_t before = got_ - (head() ? sizeof head_ : 0);
  const ptrdiff_t n = head() ? connection_->receive(body_ + before, bytes_ - before)
                             : connection_->receive(reinterpret_cast<char*>(&head_) + before, sizeof head_ - before);
  got_ += n > 0 ? static_cast<size_t>(n) : 0;
  return n;
}

}  // namespace cc
