// lanes: vectors of elements: load and widen, compute, narrow and store.
// Units     A vector holds kLanes elements as partials, in kVectorBytes.
// Contract  The bits of core/half.h for all inputs except NaN. No alignment is required.
// Tests     tests/cpp/half_test.cpp tries all 16-bit floats; tests/conformance/test_bits.py
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/fold.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#define PYRINGAR_INLINE inline __attribute__((always_inline))
#define PYRINGAR_INLINE_LAMBDA __attribute__((always_inline))

namespace pyringar {

// Bytes of a register: g++ keeps wider vectors on the stack, three times slower with AVX2.
#if defined(__AVX512F__)
inline constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <typename T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};

template <typename V>
using LaneOf = std::remove_reference_t<decltype(std::declval<V&>()[0])>;

template <typename V>
  requires std::is_integral_v<LaneOf<V>>
struct Wrapping<V> : VectorOf<std::make_unsigned_t<LaneOf<V>>, sizeof(V) / sizeof(LaneOf<V>)> {};

template <typename V>
PYRINGAR_INLINE V load_vector(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <typename V>
PYRINGAR_INLINE void store_vector(V v, void* to) {
  std::memcpy(to, &v, sizeof v);
}

template <typename T>
struct PlainLanes {
  using Element = T;
  using Partial = T;
  static constexpr int kLanes = kVectorBytes / sizeof(T);
  using Vector = typename VectorOf<T, kLanes>::type;
  using Packed = Vector;
  static PYRINGAR_INLINE Vector load(const T* from) { return load_vector<Vector>(from); }
  static PYRINGAR_INLINE Packed pack(Vector v) { return v; }
};

inline constexpr int kWords = kVectorBytes / 4;

struct HalfLanes {
  using Partial = float;
  static constexpr int kLanes = kWords;
  using F32 = VectorOf<float, kWords>::type;
  using U32 = VectorOf<std::uint32_t, kWords>::type;
  using U16 = VectorOf<std::uint16_t, kWords>::type;
  using Vector = F32;
  using Packed = U16;
};

struct BFloat16Lanes : HalfLanes {
  using Element = BFloat16;
  static PYRINGAR_INLINE Vector load(const BFloat16* from) {
    return (F32)(__builtin_convertvector(load_vector<U16>(from), U32) << 16);
  }
  static PYRINGAR_INLINE Packed pack(Vector v) {
    const U32 bits = (U32)v;
    const U32 rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const U32 nan = bits >> 16 | 0x40u;
    return __builtin_convertvector((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded, U16);
  }
};

// Pairs of bf16 elements in 32-bit words, for the fused loop: a shift widens the even elements,
// which are the low halves of words, and a mask widens the odd elements.
struct BFloat16PairLanes {
  using Element = BFloat16;
  using Partial = float;
  using Half = BFloat16Lanes;
  using F32 = Half::F32;
  using U32 = Half::U32;
  static constexpr int kLanes = 2 * kWords;
  struct Vector {
    F32 even;
    F32 odd;
  };
  using Packed = U32;
  static PYRINGAR_INLINE Vector load(const BFloat16* from) {
    const U32 words = load_vector<U32>(from);
    return {(F32)(words << 16), (F32)(words & 0xffff0000u)};
  }
  static PYRINGAR_INLINE Packed pack(Vector v) {
    return rounded(v.even) >> 16 | (rounded(v.odd) & 0xffff0000u);
  }

 private:
  // Round to nearest even in the high half of each word; the low half is garbage.
  static PYRINGAR_INLINE U32 rounded(F32 v) {
    const U32 bits = (U32)v;
    return v != v ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u);
  }
};

struct Float16Lanes : HalfLanes {
  using Element = Float16;
#if defined(__AVX512F__)
  static PYRINGAR_INLINE Vector load(const Float16* from) {
    return (Vector)_mm512_maskz_cvtph_ps(0xffff, load_vector<__m256i>(from));
  }
  static PYRINGAR_INLINE Packed pack(Vector v) {
    return (Packed)_mm512_maskz_cvtps_ph(0xffff, (__m512)v,
                                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  }
#elif defined(__AVX2__) && defined(__F16C__)
  static PYRINGAR_INLINE Vector load(const Float16* from) {
    return (Vector)_mm256_cvtph_ps(load_vector<__m128i>(from));
  }
  static PYRINGAR_INLINE Packed pack(Vector v) {
    return (Packed)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
  }
#else
  static PYRINGAR_INLINE Vector load(const Float16* from) { return load_plainly(from); }
  static PYRINGAR_INLINE Packed pack(Vector v) { return pack_plainly(v); }
#endif

 private:
  // Compute all branches of core/half.h, then select per lane.
  static PYRINGAR_INLINE Vector load_plainly(const Float16* from) {
    const U32 bits = __builtin_convertvector(load_vector<U16>(from), U32);
    const U32 sign = (bits & 0x8000u) << 16;
    const U32 rest = bits & 0x7fffu;
    const U32 special = 0x7f800000u | (rest & 0x3ffu) << 13;
    const U32 normal = (rest << 13) + (112u << 23);
    const U32 subnormal = (U32)(__builtin_convertvector(rest, F32) * 0x1p-24f);
    return (F32)(sign | (rest >= 0x7c00u ? special : rest >= 0x400u ? normal : subnormal));
  }
  static PYRINGAR_INLINE Packed pack_plainly(Vector v) {
    const U32 bits = (U32)v;
    const U32 sign = bits >> 16 & 0x8000u;
    const U32 rest = bits & 0x7fffffffu;
    const U32 rebased = rest - (112u << 23);
    const U32 normal = (rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13;
    const U32 subnormal = (U32)((F32)rest + 0.5f) - 0x3f000000u;
    const U32 infinity = U32{} + 0x7c00u;
    const U32 nan = U32{} + 0x7e00u;
    const U32 finite = rest >= 0x38800000u ? normal : subnormal;
    const U32 number = rest >= 0x47800000u ? infinity : finite;
    return __builtin_convertvector(sign | (rest > 0x7f800000u ? nan : number), U16);
  }
};

template <DType dtype>
struct LanesOf : PlainLanes<ItemOf<dtype>> {};
template <>
struct LanesOf<DType::kFloat16> : Float16Lanes {};
template <>
struct LanesOf<DType::kBFloat16> : BFloat16Lanes {};

// Lanes of the fused loop. Pairs need little-endian words, whose low half comes first in memory.
template <DType dtype>
struct FusedLanesOf : LanesOf<dtype> {};
template <>
struct FusedLanesOf<DType::kBFloat16>
    : std::conditional_t<std::endian::native == std::endian::little, BFloat16PairLanes,
                         BFloat16Lanes> {};

}  // namespace pyringar
