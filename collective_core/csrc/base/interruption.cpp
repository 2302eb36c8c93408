#include "base/interruption.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "base/recorder.h"

namespace cc {
namespace {

// The handlers need the interpreter's lock, which another thread may hold for some milliseconds: no short wait asks.
constexpr int64_t interval_ns = 200 * 1000 * 1000;

Interpreter hooks{};
thread_local bool in_handler = false;
thread_local int64_t last_look = 0, next_run = 0;
thread_local void* raised[3] = {};

}  // namespace

void use_interpreter(const Interpreter& interpreter) {
  hooks = interpreter;
}

bool runs_handlers() {
  return hooks.run_handlers && syscall(SYS_gettid) == getpid();
}

bool is_interrupted() {
  if (in_handler || !runs_handlers()) return false;
  const int64_t now = monotonic_ns();
  if (now - last_look > interval_ns) next_run = now + interval_ns;  // a wait has just begun
  last_look = now;
  if (now < next_run) return false;
  next_run = now + interval_ns;
  const int state = hooks.acquire();
  in_handler = true;
  const bool has_raised = hooks.run_handlers() != 0;
  in_handler = false;
  if (has_raised) hooks.fetch(&raised[0], &raised[1], &raised[2]);
  hooks.release(state);
  return has_raised;
}

void take_raised(void** type_value_traceback) {
  std::copy_n(raised, 3, type_value_traceback);
  std::fill_n(raised, 3, nullptr);
}

bool is_in_handler() {
  return in_handler;
}

}  // namespace cc
