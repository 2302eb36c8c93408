// Sums must not depend on which thread forms them: a program may have told its own to treat tiny numbers as zero.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cc {

// While it lives, this thread keeps subnormal numbers; afterwards it does with them what it did before.
class ExactFloats {
 public:
  ExactFloats() : before_(get()) {
    if (before_ & flushing) set(before_ & ~flushing);
  }
  ExactFloats(const ExactFloats&) = delete;
  ExactFloats& operator=(const ExactFloats&) = delete;
  ~ExactFloats() {
    if (get() != before_) set(before_);  // also the flags that sums have raised
  }

 private:
#if defined(__x86_64__)
  static constexpr uint64_t flushing = 0x8040;  // MXCSR: flush to zero, denormals are zero
  static uint64_t get() { return _mm_getcsr(); }
  static void set(uint64_t word) { _mm_setcsr(static_cast<uint32_t>(word)); }
#elif defined(__aarch64__)
  static constexpr uint64_t flushing = uint64_t{1} << 24;  // FPCR: flush to zero
  static uint64_t get() {
    uint64_t word = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void set(uint64_t word) { __asm__ volatile("msr fpcr, %0" : : "r"(word)); }
#else
  static constexpr uint64_t flushing = 0;
  static uint64_t get() { return 0; }
  static void set(uint64_t) {}
#endif
  uint64_t before_;
};

}  // namespace cc
