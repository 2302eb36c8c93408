// Chooses the kernels at run time.
#include "kernels/kernels.h"

#include <cstdlib>
#include <cstring>

#if CC_X86_KERNELS
#include <cpuid.h>
#endif

namespace cc {

extern const Kernels kernels_default;
#if CC_X86_KERNELS
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

namespace {

#if CC_X86_KERNELS
struct Features {
  bool avx2 = false, avx512 = false;
};

// Asked of the processor: __builtin_cpu_supports() always says no in wheels, because Zig's run time has a stub for it.
// The operating system must save the registers, too, which XCR0 says.
Features features() {
  unsigned a = 0, b = 0, c = 0, d = 0, saved = 0, unused = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_F16C)) return {};
  __asm__("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2) || (saved & 0x6) != 0x6) return {};
  const unsigned wide = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
  return {true, (b & wide) == wide && (saved & 0xe0) == 0xe0};
}
#endif

const Kernels& choose() {
#if CC_X86_KERNELS
  const char* wish = std::getenv("COLLECTIVE_SIMD");
  const bool plain = wish && std::strcmp(wish, "default") == 0;
  const bool at_most_avx2 = wish && std::strcmp(wish, "avx2") == 0;
  const Features here = features();
  if (here.avx512 && !plain && !at_most_avx2) return kernels_avx512;
  if (here.avx2 && !plain) return kernels_avx2;
#endif
  return kernels_default;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace cc
