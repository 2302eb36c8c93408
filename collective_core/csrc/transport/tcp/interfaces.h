#pragma once

#include <string>

namespace cc {

// "name address prefix-length" lines of the interfaces that are up. Throws Failure(internal).
std::string list_interfaces();

}  // namespace cc
