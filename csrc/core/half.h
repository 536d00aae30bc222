// half: conversion of one fp16 or bf16 element to fp32 and back, with integer arithmetic.
// Contract  Widening is exact. Narrowing rounds to nearest, ties to even, keeps subnormals and
//           infinities, and turns every NaN into a quiet NaN.
// Source    IEEE 754-2019, sections 3.4 and 4.3.1.
// Tests     tests/cpp/half_test.cpp tries all 65,536 values, and all rounding boundaries
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/schedule.h"

namespace pyringar {

PYRINGAR_HD inline float bits_to_float(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

PYRINGAR_HD inline std::uint32_t float_to_bits(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

PYRINGAR_HD inline float widen(BFloat16 x) { return bits_to_float(std::uint32_t{x.bits} << 16); }

PYRINGAR_HD inline float widen(Float16 x) {
  const std::uint32_t sign = std::uint32_t{x.bits & 0x8000u} << 16;
  const std::uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
  if (rest >= 0x0400u) return bits_to_float(sign | ((rest << 13) + (112u << 23)));
  // Subnormal: rest * 2^-24, exact in fp32.
  return bits_to_float(sign | float_to_bits(static_cast<float>(rest) * 0x1p-24f));
}

PYRINGAR_HD inline BFloat16 narrow_to_bfloat16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>(bits >> 16 | 0x40u)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

PYRINGAR_HD inline Float16 narrow_to_float16(float value) {
  const std::uint32_t bits = float_to_bits(value);
  const std::uint32_t sign = bits >> 16 & 0x8000u;
  const std::uint32_t rest = bits & 0x7fffffffu;
  std::uint32_t half;
  if (rest > 0x7f800000u) {
    half = 0x7e00u;
  } else if (rest >= 0x47800000u) {  // 2^16 and above: infinity
    half = 0x7c00u;
  } else if (rest >= 0x38800000u) {  // normal; a carry out of the mantissa increments the exponent
    const std::uint32_t rebased = rest - (112u << 23);
    half = (rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13;
  } else {
    // Subnormal: adding 0.5 aligns the bits, so that fp32 rounding gives the fp16 rounding.
    half = float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000u;
  }
  return {static_cast<std::uint16_t>(sign | half)};
}

}  // namespace pyringar
