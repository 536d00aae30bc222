// pack: sixteen bytes of elements: load, widen, reduce, narrow, store.
//
// Floor     cuda: device code.
// Contract  the arithmetic of the CPU engine, bit for bit, for everything that is not a NaN: 16-bit
//           floats in fp32 and rounded once, integers wrap, no contraction, no flushing (see the
//           compiler flags in pyringar/engine/compile.py).
// Threads   pure functions, any.
// Tests     tests/cpp/cuda/, tests/ptx, tests/cuda compares CPU bits with GPU bits
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/half.h"
#include "cuda/flag.cuh"

namespace pyringar::cuda {

// Elements as they lie in memory: some times sixteen bytes, or a single one.
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

// What an element is added in, and the way there and back.
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
struct ElementOf;
template <>
struct ElementOf<DType::kFloat64> : PlainElement<double> {};
template <>
struct ElementOf<DType::kFloat32> : PlainElement<float> {};
template <>
struct ElementOf<DType::kFloat16> : Float16Element {};
template <>
struct ElementOf<DType::kBFloat16> : BFloat16Element {};
template <>
struct ElementOf<DType::kInt8> : PlainElement<std::int8_t> {};
template <>
struct ElementOf<DType::kUInt8> : PlainElement<std::uint8_t> {};
template <>
struct ElementOf<DType::kInt32> : PlainElement<std::int32_t> {};
template <>
struct ElementOf<DType::kInt64> : PlainElement<std::int64_t> {};

// The reductions, as cpu/lanes.h words them: "a" is the partial so far, "b" the next rank's part.
// Integers wrap; signed overflow is not defined, so they are added without a sign. Small ones are
// promoted to int, whose product of two 16-bit numbers could overflow: hence the cast to unsigned.
struct Sum {
  template <typename T>
  static PYRINGAR_DEVICE T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using Unsigned = std::make_unsigned_t<T>;
      return static_cast<T>(
          static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
    } else {
      return a + b;
    }
  }
};

struct Prod {
  template <typename T>
  static PYRINGAR_DEVICE T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using Unsigned = std::make_unsigned_t<T>;
      return static_cast<T>(static_cast<Unsigned>(a) * 1u * static_cast<Unsigned>(b));
    } else {
      return a * b;
    }
  }
};

// A NaN on either side wins, as in torch.maximum; of two equal numbers (0 and -0) the later one.
struct Max {
  template <typename T>
  static PYRINGAR_DEVICE T apply(T a, T b) {
    return (a > b || a != a) ? a : b;
  }
};

struct Min {
  template <typename T>
  static PYRINGAR_DEVICE T apply(T a, T b) {
    return (a < b || a != a) ? a : b;
  }
};

// Only the mean divides, and the mean is Sum's. Integers divide towards zero.
template <typename Op, typename T>
PYRINGAR_DEVICE T divided(T x, int divisor) {
  if constexpr (std::is_same_v<Op, Sum>) {
    if constexpr (std::is_integral_v<T>) {
      if (divisor != 1) return static_cast<T>(x / divisor);
    } else {
      if (divisor != 1) return x / static_cast<T>(divisor);
    }
  }
  return x;
}

// The elements of sixteen bytes, widened.
template <typename E>
struct Pack {
  static constexpr int kSize = kPackBytes / static_cast<int>(sizeof(typename E::Element));
  typename E::Partial lane[kSize];

  static PYRINGAR_DEVICE Pack from_elements(Bytes16 bytes) {
    typename E::Element elements[kSize];
    __builtin_memcpy(elements, &bytes, sizeof bytes);
    Pack pack;
#pragma unroll
    for (int i = 0; i < kSize; ++i) pack.lane[i] = E::widened(elements[i]);
    return pack;
  }
  PYRINGAR_DEVICE Bytes16 to_elements() const {
    typename E::Element elements[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) elements[i] = E::narrowed(lane[i]);
    Bytes16 bytes;
    __builtin_memcpy(&bytes, elements, sizeof bytes);
    return bytes;
  }
  template <typename Op>
  PYRINGAR_DEVICE void combine(const Pack& other) {
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      lane[i] = Op::template apply<typename E::Partial>(lane[i], other.lane[i]);
  }
  template <typename Op>
  PYRINGAR_DEVICE void divide(int divisor) {
    using Partial = typename E::Partial;
    if constexpr (std::is_same_v<Op, Sum> && std::is_floating_point_v<Partial>) {
      if ((divisor & (divisor - 1)) == 0) {  // a power of two: the same bits, and cheaper
        const Partial factor = 1 / static_cast<Partial>(divisor);
#pragma unroll
        for (int i = 0; i < kSize; ++i) lane[i] *= factor;
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kSize; ++i) lane[i] = divided<Op>(lane[i], divisor);
  }
};

}  // namespace pyringar::cuda
