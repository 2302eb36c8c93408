// The vocabulary that every part shares. No library headers with inline code: the kernels include this file, and what
// they include is compiled for processors that a host may not have (see half.h).
#pragma once

#include <stdint.h>

namespace cc {

enum class Kind : uint8_t { allreduce = 0, allgather, broadcast, barrier, alltoall, reducescatter, join, count };
enum class ReduceOp : uint8_t { sum = 0, average = 1, min = 2, max = 3, product = 4 };
// gpu: the engine sees a copy in host memory. gpu_memory: it sees the GPU's own address, which it must not touch.
enum class Device : uint8_t { host = 0, gpu = 1, gpu_memory = 2, count };
// Whose rules hold where ours differ on purpose (docs/horovod.md). Under Horovod's a name may be in flight once per
// kind, averages divide by all ranks though some have joined, and only reductions to all and barriers go on without
// those.
enum class Semantics : uint8_t { engine = 0, horovod = 1, count };
enum class DType : uint8_t { u8, i8, u16, i16, u32, i32, u64, i64, f16, bf16, f32, f64, boolean, count };

}  // namespace cc
