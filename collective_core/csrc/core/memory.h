// Memory for data of other ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "core/errors.h"

namespace cc {

// At least a byte of it. Throws Failure where there is not so much memory.
inline std::unique_ptr<char[]> memory_for(uint64_t bytes) {
  std::unique_ptr<char[]> memory(new (std::nothrow) char[std::max<uint64_t>(bytes, 1)]);
  if (!memory)
    throw Failure(Fault::internal,
                  "there is no memory for the " + std::to_string(bytes) + " bytes that it would receive");
  return memory;
}

}  // namespace cc
