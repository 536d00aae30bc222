// pack: sixteen bytes of elements: load, widen, reduce, narrow, store.
//
// Floor     cuda: device code.
// Contract  the arithmetic of the CPU engine, bit for bit, for everything that is not a NaN: 16-bit
//           floats in fp32 and rounded once, integers wrap, no contraction, no flushing (see the
//           compiler flags in pyringar/engine/build.py). Loads go past L1: other multiprocessors,
//           other devices and the host write what is read here.
// Threads   pure functions, any.
// Tests     tests/cpp/cuda/, tests/cuda compares CPU bits with GPU bits
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/half.h"
#include "cuda/device.cuh"

namespace pyringar::cuda {

inline constexpr int kPackBytes = 16;

struct alignas(16) Bytes16 {
  std::uint32_t word[4];
};

#if !defined(__CUDA_ARCH__)
// As a GPU would.
PYRINGAR_DEVICE inline void trap_unless_aligned(const void* pointer) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % kPackBytes != 0) __builtin_trap();
}
#endif

PYRINGAR_DEVICE inline Bytes16 load16(const void* from) {
#if defined(__CUDA_ARCH__)
  const uint4 v = __ldcg(static_cast<const uint4*>(from));
  return {{v.x, v.y, v.z, v.w}};
#else
  trap_unless_aligned(from);
  Bytes16 bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return bytes;
#endif
}

PYRINGAR_DEVICE inline void store16(Bytes16 bytes, void* to) {
#if defined(__CUDA_ARCH__)
  __stcg(static_cast<uint4*>(to),
         make_uint4(bytes.word[0], bytes.word[1], bytes.word[2], bytes.word[3]));
#else
  trap_unless_aligned(to);
  __builtin_memcpy(to, &bytes, sizeof bytes);
#endif
}

template <typename T>
PYRINGAR_DEVICE T load_element(const T* from) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 8) {
    const auto bits = __ldcg(reinterpret_cast<const unsigned long long*>(from));
    T value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  } else if constexpr (sizeof(T) == 4) {
    const auto bits = __ldcg(reinterpret_cast<const unsigned*>(from));
    T value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  } else if constexpr (sizeof(T) == 2) {
    const auto bits = __ldcg(reinterpret_cast<const unsigned short*>(from));
    T value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  } else {
    const auto bits = __ldcg(reinterpret_cast<const unsigned char*>(from));
    T value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  }
#else
  return *from;
#endif
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
  // Partials as they lie in a slot: one or two times sixteen bytes.
  static constexpr int kPartialBytes = kSize * static_cast<int>(sizeof(typename E::Partial));
  static PYRINGAR_DEVICE Pack from_partials(const void* from) {
    Bytes16 bytes[kPartialBytes / kPackBytes];
#pragma unroll
    for (int i = 0; i < kPartialBytes / kPackBytes; ++i) {
      bytes[i] = load16(static_cast<const char*>(from) + i * kPackBytes);
    }
    Pack pack;
    __builtin_memcpy(pack.lane, bytes, sizeof bytes);
    return pack;
  }
  PYRINGAR_DEVICE void to_partials(void* to) const {
    Bytes16 bytes[kPartialBytes / kPackBytes];
    __builtin_memcpy(bytes, lane, sizeof bytes);
#pragma unroll
    for (int i = 0; i < kPartialBytes / kPackBytes; ++i) {
      store16(bytes[i], static_cast<char*>(to) + i * kPackBytes);
    }
  }
  template <typename Op>
  PYRINGAR_DEVICE void combine(const Pack& other) {
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      lane[i] = Op::template apply<typename E::Partial>(lane[i], other.lane[i]);
  }
  template <typename Op>
  PYRINGAR_DEVICE void divide(int divisor) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) lane[i] = divided<Op>(lane[i], divisor);
  }
};

}  // namespace pyringar::cuda
