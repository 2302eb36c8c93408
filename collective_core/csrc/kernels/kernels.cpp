// Chooses the kernels at run time.
#include "kernels/kernels.h"

#include <cstdlib>
#include <cstring>

namespace cc {

extern const Kernels kernels_default;
#if CC_X86_KERNELS
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

namespace {

const Kernels& choose() {
#if CC_X86_KERNELS
  const char* wish = std::getenv("COLLECTIVE_SIMD");
  const bool plain = wish && std::strcmp(wish, "default") == 0;
  const bool at_most_avx2 = wish && std::strcmp(wish, "avx2") == 0;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && !plain && !at_most_avx2) return kernels_avx512;
  if (avx2 && !plain) return kernels_avx2;
#endif
  return kernels_default;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace cc
