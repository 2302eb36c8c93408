// The one exception of the engine: what kind of failure, which ranks are to blame, and a sentence for the user.
// It never crosses the C API: c_api.cpp turns it into a number and a text.
#pragma once

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace cc {

// The numbers are part of the C API (errors.py has the same list).
enum class Fault : int {
  none = 0,
  mismatch = 1,   // ranks asked for different things; the engine stays usable
  timeout = 2,    // a rank did not come in time; the engine is finished
  peer_lost = 3,  // a rank died or left; the engine is finished
  invalid = 4,    // this rank asked for something impossible; nothing was sent
  internal = 5,   // the system refused something (memory, sockets); the engine is finished
  closed = 6,     // not initialised, or shut down
  // A signal has ended this rank's wait, and the engine is finished; to the others this rank is lost.
  interrupted = 7,
};

class Failure : public std::runtime_error {
 public:
  Failure(Fault kind, const std::string& text, std::vector<int> blamed = {})
      : std::runtime_error(text), fault(kind), ranks(std::move(blamed)) {}
  Fault fault;
  std::vector<int> ranks;
  bool one_name = false;  // a mismatch of operations that have the same name on all ranks
};

// After these the ranks no longer agree on what has been exchanged, so nothing more may be sent.
inline bool is_fatal(Fault fault) {
  return fault != Fault::mismatch && fault != Fault::invalid;
}

// `what`, and why the system has refused it.
inline std::string system_error(const std::string& what) {
  return what + ": " + std::strerror(errno);
}

}  // namespace cc
