#include "transport/tcp/tcp_transport.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>

namespace cc {

bool TcpConnection::is_delivered() {
  pollfd state{fd_.get(), POLLIN, 0};
  if (::poll(&state, 1, 0) > 0 && (state.revents & (POLLERR | POLLHUP)) != 0) return true;  // nobody is there
  int unacknowledged = 0;
  return ioctl(fd_.get(), SIOCOUTQ, &unacknowledged) != 0 || unacknowledged == 0;
}

bool TcpTransport::poll(std::vector<PollEntry>& entries, int milliseconds) {
  states_.clear();
  for (const PollEntry& entry : entries) {
    const int fd = entry.endpoint ? static_cast<const TcpConnection*>(entry.endpoint)->fd() : -1;
    states_.push_back({fd, static_cast<short>(entry.event == PollEvent::send ? POLLOUT : POLLIN), 0});
  }
  const bool any = ::poll(states_.data(), states_.size(), milliseconds) > 0;
  for (size_t i = 0; i < entries.size(); ++i) entries[i].ready = any && states_[i].revents != 0;
  return any;
}

}  // namespace cc
