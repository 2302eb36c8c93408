// Lists this host's network addresses, one line each: "name address prefix-length", for runtime/rendezvous.py to choose
// from. Only interfaces that are up; nothing is sent anywhere.
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/errors.h"
#include "transport/tcp/interfaces.h"
#include "transport/tcp/sockets.h"

namespace cc {
namespace {

int prefix_length(const void* mask, size_t bytes) {
  int bits = 0;
  for (size_t i = 0; i < bytes; ++i) bits += __builtin_popcount(static_cast<const unsigned char*>(mask)[i]);
  return bits;
}

}  // namespace

std::string list_interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw Failure(Fault::internal, system_error("getifaddrs"));
  std::string lines;
  for (const ifaddrs* entry = first; entry; entry = entry->ifa_next) {
    if (!entry->ifa_addr || !entry->ifa_netmask || !(entry->ifa_flags & IFF_UP)) continue;
    char text[INET6_ADDRSTRLEN] = {};
    int prefix = 0;
    if (entry->ifa_addr->sa_family == AF_INET) {
      inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(entry->ifa_addr)->sin_addr, text, sizeof text);
      prefix = prefix_length(&reinterpret_cast<const sockaddr_in*>(entry->ifa_netmask)->sin_addr, 4);
    } else if (entry->ifa_addr->sa_family == AF_INET6) {
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(entry->ifa_addr);
      if (IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) continue;  // useless without its zone
      inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof text);
      prefix = prefix_length(&reinterpret_cast<const sockaddr_in6*>(entry->ifa_netmask)->sin6_addr, 16);
    } else {
      continue;
    }
    lines += std::string(entry->ifa_name) + " " + text + " " + std::to_string(prefix) + "\n";
  }
  freeifaddrs(first);
  return lines;
}

}  // namespace cc
