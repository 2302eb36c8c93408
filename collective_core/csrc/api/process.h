// What the files of the C interface share: the process's engines, and how failures become numbers.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "api/c_api.h"
#include "base/errors.h"
#include "engine/engine.h"

namespace cc {

// For cc_last_error; returns the fault's number.
int32_t remember(Fault fault, const std::string& text, const std::vector<int>& ranks, bool one_name = false);

// What `body` returns, or 0 where it returns nothing; the number of the fault that it throws.
template <class Body>
int32_t guarded(Body body) {
  try {
    if constexpr (std::is_void_v<decltype(body())>)
      body();
    else
      return body();
  } catch (const Failure& failure) {
    return remember(failure.fault, failure.what(), failure.ranks);
  } catch (const std::exception& error) {
    return remember(Fault::internal, error.what(), {});
  }
  return 0;
}

// Throws Failure in a child that was forked from a rank. To be called before any mutex is taken, which another thread
// of the parent may have held at the fork.
void refuse_forked();

// The engine of a process set of this rank's. Throws Failure(closed) where there is none.
std::shared_ptr<Engine> engine_of(int32_t process_set);

// Throws Failure(invalid) for what makes no sense. `size`: ranks of the process set.
std::shared_ptr<Task> make_task(const cc_operation& op, int size);

// The fault of a task that is done, remembered.
int32_t result_of(const Task& task);

// Runs it to its end. Returns its fault.
int32_t run_task(Engine& engine, const std::shared_ptr<Task>& task);

}  // namespace cc
