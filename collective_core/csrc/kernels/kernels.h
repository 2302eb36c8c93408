// The arithmetic of reductions: in[0] + in[1] + ... element by element, strictly in the order given.
//
// Element types other than the half types are their own accumulator. float16 and bfloat16 accumulate in float32 and are
// rounded once, by finish(). Integers wrap as unsigned numbers do; their average is rounded towards zero. bool:
// sum, max = or; product, min = and. Min and Max let a NaN through. No kernel reorders, so every instruction set and
// every chunk size gives the same bits.
#pragma once

#include <stddef.h>

#include "base/types.h"

namespace cc {

struct Reduction {
  DType dtype;
  ReduceOp op;
  int divisor;       // Average: the number of ranks; otherwise 1
  double prescale;   // each input is multiplied by it first; integers are rounded towards zero
  double postscale;  // and the result by this, after the division
};

struct Kernels {
  const char* name;
  // acc = fresh ? in[0] : acc + in[0]; then acc += in[1] ... in[inputs - 1]. acc has n accumulators.
  void (*accumulate)(const Reduction&, void* acc, bool fresh, const void* const* in, int inputs, size_t n);
  // out = acc / divisor * postscale, rounded to the element type. out may be acc where the types are the same.
  void (*finish)(const Reduction&, void* out, const void* acc, size_t n);
  // Both in one pass, in blocks that stay in the first-level cache. out must not overlap any input but may equal one.
  void (*reduce)(const Reduction&, void* out, const void* const* in, int inputs, size_t n);
  // The sum or average of `ranks` inputs in one pass into as many outputs, which may be these inputs: float32 and
  // float64 of two to eight and of 16 ranks, without factors. False, with nothing done, for everything else.
  bool (*reduce_into_all)(const Reduction&, void* const* out, const void* const* in, int ranks, size_t n);
  // As memcpy, of some KiB that stay in cache: memcpy's string instructions take up to five times as long on some
  // processors (AMD Zen 3), where source and target begin at nearly the same place of a page.
  void (*copy)(void* out, const void* in, size_t bytes);
  // Copies past the caches: for what is not read again soon. What it wrote is visible to others after stream_done().
  void (*stream)(void* out, const void* in, size_t bytes);
  void (*stream_done)();
};

// The fastest set that this processor runs. COLLECTIVE_SIMD=default|avx2|avx512 asks for a lesser one (for tests).
const Kernels& kernels();

}  // namespace cc
