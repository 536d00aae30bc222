// pack: 16 bytes of elements: load, widen, reduce, narrow, store.
//
// Contract  The CPU engine's arithmetic, bit for bit, except for NaNs. 16-bit floats are reduced in
//           fp32 and rounded once. Integers wrap. No contraction, no flushing of denormals
//           (compiler flags: pyringar/engine/compile.py).
// Tests     tests/cpp/cuda/, tests/cuda compares CPU bits with GPU bits
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/fold.h"
#include "core/half.h"
#include "cuda/flag.cuh"

namespace pyringar::cuda {

// kSize elements in their memory format: a multiple of 16 bytes, or one element.
template <typename T, int kSize>
struct Lanes {
  static_assert(kSize * sizeof(T) % kPackBytes == 0);
  Bytes16 bytes[kSize * sizeof(T) / kPackBytes];

  static PYRINGAR_DEVICE Lanes of(const T (&values)[kSize]) {
    Lanes lanes;
    __builtin_memcpy(lanes.bytes, values, sizeof values);
    return lanes;
  }
  PYRINGAR_DEVICE void read(T (&values)[kSize]) const {
    __builtin_memcpy(values, bytes, sizeof values);
  }
};

template <typename T>
struct Lanes<T, 1> {
  T value;

  static PYRINGAR_DEVICE Lanes of(const T (&values)[1]) { return {values[0]}; }
  PYRINGAR_DEVICE void read(T (&values)[1]) const { values[0] = value; }
};

PYRINGAR_DEVICE inline bool is_vector(const void* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer) % kPackBytes == 0;
}

template <int kSize, typename T>
PYRINGAR_DEVICE Lanes<T, kSize> load_lanes(const T* from) {
  Lanes<T, kSize> lanes;
  if constexpr (kSize == 1) {
    lanes.value = load_element(from);
  } else {
#pragma unroll
    for (std::size_t i = 0; i < sizeof lanes / kPackBytes; ++i) {
      lanes.bytes[i] = load16(reinterpret_cast<const Bytes16*>(from) + i);
    }
  }
  return lanes;
}

template <typename T, int kSize>
PYRINGAR_DEVICE void store_lanes(const Lanes<T, kSize>& lanes, T* to) {
  if constexpr (kSize == 1) {
    *to = lanes.value;
  } else {
#pragma unroll
    for (std::size_t i = 0; i < sizeof lanes / kPackBytes; ++i) {
      store16(lanes.bytes[i], reinterpret_cast<Bytes16*>(to) + i);
    }
  }
}

// An element type, the type of its partial sums, and the conversions.
template <typename T>
struct PlainElement {
  using Element = T;
  using Partial = T;
  static PYRINGAR_DEVICE T widened(T x) { return x; }
  static PYRINGAR_DEVICE T narrowed(T x) { return x; }
};

struct Float16Element {
  using Element = Float16;
  using Partial = float;
  static PYRINGAR_DEVICE float widened(Float16 x) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
    return value;
#else
    return widen(x);
#endif
  }
  static PYRINGAR_DEVICE Float16 narrowed(float x) {
#if defined(__CUDA_ARCH__)
    Float16 half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x));
    return half;
#else
    return narrow_to_float16(x);
#endif
  }
};

struct BFloat16Element {
  using Element = BFloat16;
  using Partial = float;
  static PYRINGAR_DEVICE float widened(BFloat16 x) { return widen(x); }
  static PYRINGAR_DEVICE BFloat16 narrowed(float x) { return narrow_to_bfloat16(x); }
};

template <DType dtype>
struct ElementOf : PlainElement<ItemOf<dtype>> {};
template <>
struct ElementOf<DType::kFloat16> : Float16Element {};
template <>
struct ElementOf<DType::kBFloat16> : BFloat16Element {};

// A sum with a division at the end. Only fused kernels use it: a ring's Sum divides too.
struct Mean : Sum {};

// x / divisor, rounded once. Integer division truncates. fp32 divides in fp64 without a call: the
// fp64 quotient is correctly rounded. Rounding it to fp32 gives the fp32 quotient, since x /
// divisor is an fp32 tie or further from a tie than the fp64 rounding error.
template <typename T>
PYRINGAR_DEVICE T divided(T x, const Divisor& divisor) {
  if constexpr (std::is_same_v<T, float>) {
    const double guess = x * divisor.reciprocal;
    const double rest = fma(-guess, static_cast<double>(divisor.value), static_cast<double>(x));
    const auto quotient = static_cast<float>(fma(rest, divisor.reciprocal, guess));
    return x + x != x ? quotient : x;  // zeros and infinities stay unchanged
  } else {
    return static_cast<T>(x / divisor.value);
  }
}

// Four bytes of elements, or one 8-byte element, widened to partials.
template <typename E>
struct Pack {
  using Partial = typename E::Partial;
  static constexpr int kItem = static_cast<int>(sizeof(typename E::Element));
  static constexpr int kBytes = kItem > 4 ? kItem : 4;
  static constexpr int kSize = kBytes / kItem;
  Partial lane[kSize];

  static PYRINGAR_DEVICE Pack from_elements(const Bytes16& bytes, int i) {
    typename E::Element elements[kSize];
    __builtin_memcpy(elements, bytes.word + i * kBytes / 4, kBytes);
    Pack pack;
#pragma unroll
    for (int lane = 0; lane < kSize; ++lane) pack.lane[lane] = E::widened(elements[lane]);
    return pack;
  }
  PYRINGAR_DEVICE void to_elements(Bytes16& bytes, int i) const {
    typename E::Element elements[kSize];
#pragma unroll
    for (int lane = 0; lane < kSize; ++lane) elements[lane] = E::narrowed(this->lane[lane]);
    __builtin_memcpy(bytes.word + i * kBytes / 4, elements, kBytes);
  }
  template <typename Op>
  PYRINGAR_DEVICE void combine(const Pack& other) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) lane[i] = Op::template apply<Partial>(lane[i], other.lane[i]);
  }
};

}  // namespace pyringar::cuda
