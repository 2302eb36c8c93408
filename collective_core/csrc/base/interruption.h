// Signals such as Ctrl-C while the main thread waits in the engine. The interpreter that has opened the library runs
// its handlers only when it is asked; one that raises ends the wait, and with it the operation. The library is not
// linked to any interpreter: it is told the addresses of four of its functions.
#pragma once

#include <chrono>

namespace cc {

struct Interpreter {
  int (*acquire)();                       // PyGILState_Ensure
  void (*release)(int);                   // PyGILState_Release
  int (*run_handlers)();                  // PyErr_CheckSignals: not 0 when one has raised
  void (*fetch)(void**, void**, void**);  // PyErr_Fetch
};
void use_interpreter(const Interpreter& interpreter);

// Whether this is the thread in which the interpreter runs the handlers, whenever it runs anything.
bool runs_handlers();
// To be called again and again, every between_signals at the latest, while this thread waits: now and then it has the
// handlers of signals run. True when one has raised; what it raised is kept for take_raised().
bool is_interrupted();
constexpr auto between_signals = std::chrono::milliseconds(100);
void take_raised(void** type_value_traceback);
// Whether this thread is in one of these handlers: it cannot wait for the operation that it has interrupted.
bool is_in_handler();

}  // namespace cc
