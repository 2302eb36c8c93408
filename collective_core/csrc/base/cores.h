// How many cores the system lets a process compute on.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <string>

namespace cc {

// The cores that this process is bound to; all that are online where the system does not tell.
cpu_set_t bound_cores();

// Cores that the control group of a process may use (versions 1 and 2), by the narrowest limit on the way to its root;
// infinite without one. `root`: a folder above proc, and above where the groups are mounted, for tests.
double core_quota(pid_t process, const std::string& root = "");

}  // namespace cc
