// float16 and bfloat16 <-> float32, one value at a time, rounding to nearest even. Free of branches so that compilers
// turn loops over them into vector code. Included by kernels that are compiled for several instruction sets: everything
// here has internal linkage, so that the linker can never let an AVX copy serve a processor without AVX.
#pragma once

#include <cstdint>
#include <cstring>

namespace {

inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_from_bfloat16(uint16_t half) {
  return float_from_bits(uint32_t(half) << 16);
}

inline uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = bits_of_float(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x0040u;  // rounding could carry a NaN over into infinity
  return static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
}

// The two conversions of float16 are those of the library FP16 (github.com/Maratyszcza/FP16, include/fp16/fp16.h):
// copyright (c) 2017 Facebook Inc. and Georgia Institute of Technology, MIT licence, see NOTICE. The compiler's own
// type, _Float16, needs GCC 12 on x86; hosts build with older ones.
//
// Both paths (normal and subnormal) are computed and one is selected: exponents are moved by multiplying and by adding
// magic numbers, which lets the floating-point unit do the normalisation and the rounding.
inline float float_from_float16(uint16_t half) {
  const uint32_t w = uint32_t(half) << 16;
  const uint32_t sign = w & 0x80000000u;
  const uint32_t doubled = w + w;
  const float normal = float_from_bits((doubled >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
  const float subnormal = float_from_bits((doubled >> 17) | (126u << 23)) - 0.5f;
  return float_from_bits(sign | (doubled < (1u << 27) ? bits_of_float(subnormal) : bits_of_float(normal)));
}

inline uint16_t float16_from_float(float value) {
  const uint32_t w = bits_of_float(value);
  const uint32_t doubled = w + w;
  const float magnitude = float_from_bits(w & 0x7FFFFFFFu);
  uint32_t bias = doubled & 0xFF000000u;
  bias = bias < 0x71000000u ? 0x71000000u : bias;
  const float base = (magnitude * 0x1.0p+112f) * 0x1.0p-110f;
  const uint32_t bits = bits_of_float(float_from_bits((bias >> 1) + 0x07800000u) + base);
  const uint32_t rounded = ((bits >> 13) & 0x7C00u) + (bits & 0x0FFFu);
  return static_cast<uint16_t>((w & 0x80000000u) >> 16 | (doubled > 0xFF000000u ? 0x7E00u : rounded));
}

}  // namespace
