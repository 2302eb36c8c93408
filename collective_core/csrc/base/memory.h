// Memory for data of other ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#include "base/errors.h"

namespace cc {

// At least a byte of it. Throws Failure where there is not so much memory.
inline std::unique_ptr<char[]> memory_for(uint64_t bytes) {
  std::unique_ptr<char[]> memory(new (std::nothrow) char[std::max<uint64_t>(bytes, 1)]);
  if (!memory)
    throw Failure(Fault::internal,
                  "there is no memory for the " + std::to_string(bytes) + " bytes that it would receive");
  return memory;
}

// Memory that is kept for the next time, because the kernel would have to clear new pages: as much as was ever asked
// for.
class KeptMemory {
 public:
  // Whatever was left in it. Throws Failure where there is not so much memory.
  char* of(size_t bytes) {
    if (bytes > bytes_) {
      memory_.reset();
      bytes_ = 0;
      memory_ = memory_for(bytes);
      bytes_ = bytes;
    }
    return memory_.get();
  }
  size_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<char[]> memory_;
  size_t bytes_ = 0;
};

}  // namespace cc
