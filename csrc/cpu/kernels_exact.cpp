// kernels_exact: the fused loop of correctly rounded sums, for floats.
// Contract  core/fold.h, "exact". The vector code proves for each lane that its sum is exact. Lanes
//           without proof are recomputed one by one with core/exact_sum.h.
// Cost      Two operations per addition with AVX-512, else five; six more for fp32 and fp64. A
//           recomputed element costs 100 ns: its terms differ by 2^24 (fp32), 2^53 (fp64) or 2^16
//           (bf16), or one is infinite.
// Source    TwoSum: Knuth, "The Art of Computer Programming" 2, 4.2.2; Ogita, Rump and Oishi 2005.
// Tests     tests/conformance/test_bits.py

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "core/exact_sum.h"
#include "cpu/kernels_impl.h"

namespace pyringar {

namespace {

#if defined(__AVX512F__)

// Masked intrinsics with a full mask: g++ warns about uninitialized values in the unmasked ones.
template <int kDirection>
PYRINGAR_INLINE __m512 add_towards(__m512 a, __m512 b) {
  return _mm512_maskz_add_round_ps(0xffff, a, b, kDirection | _MM_FROUND_NO_EXC);
}
template <int kDirection>
PYRINGAR_INLINE __m512d add_towards(__m512d a, __m512d b) {
  return _mm512_maskz_add_round_pd(0xff, a, b, kDirection | _MM_FROUND_NO_EXC);
}

// A sum rounded up and a sum rounded down: exact if both are equal.
template <typename V>
struct ProvedSum {
  V up;
  V down;

  PYRINGAR_INLINE void begin(V x) { up = down = x; }
  PYRINGAR_INLINE void add(V x) {
    up = add_towards<_MM_FROUND_TO_POS_INF>(up, x);
    down = add_towards<_MM_FROUND_TO_NEG_INF>(down, x);
  }
  PYRINGAR_INLINE V result() const { return up; }
  PYRINGAR_INLINE auto proof() const { return up == down; }
};

#else

// A sum, and whether each addition was exact: subtracting a term again reveals any loss.
template <typename V>
struct ProvedSum {
  V sum;
  decltype(V{} == V{}) is_exact;

  PYRINGAR_INLINE void begin(V x) { sum = x, is_exact = V{} == V{}; }
  PYRINGAR_INLINE void add(V x) {
    const V next = sum + x;
    is_exact &= ((next - sum) == x) & ((next - x) == sum);
    sum = next;
  }
  PYRINGAR_INLINE V result() const { return sum; }
  PYRINGAR_INLINE auto proof() const { return is_exact; }
};

#endif

// A sum of fp32 or fp64, and the sum of its rounding errors.
template <typename V>
struct LongSum {
  V sum;
  ProvedSum<V> errors;

  PYRINGAR_INLINE void begin(V x) { sum = x, errors.begin(V{}); }
  PYRINGAR_INLINE void add(V x) {
    const V next = sum + x;
    const V of_x = next - sum;
    errors.add((sum - (next - of_x)) + (x - of_x));
    sum = next;
  }
  PYRINGAR_INLINE V result() const {
    const V lost = errors.result();
    return lost == V{} ? sum : sum + lost;  // adding 0 to a sum of -0 would give 0
  }
  PYRINGAR_INLINE auto proof() const { return errors.proof(); }
};

template <typename L>
struct SumOf : std::conditional_t<sizeof(typename L::Element) == 2, ProvedSum<typename L::Vector>,
                                  LongSum<typename L::Vector>> {
  bool is_proved(int lane) const { return this->proof()[lane] != 0; }
};

template <PairedLanes L>
struct SumOf<L> {
  using Vector = typename L::Vector;
  SumOf<typename L::Half> even;
  SumOf<typename L::Half> odd;

  PYRINGAR_INLINE void begin(Vector x) { even.begin(x.even), odd.begin(x.odd); }
  PYRINGAR_INLINE void add(Vector x) { even.add(x.even), odd.add(x.odd); }
  PYRINGAR_INLINE Vector result() const { return {even.result(), odd.result()}; }
  PYRINGAR_INLINE auto proof() const { return even.proof() & odd.proof(); }
  bool is_proved(int lane) const { return (lane % 2 == 0 ? even : odd).is_proved(lane / 2); }
};

template <typename V>
PYRINGAR_INLINE bool are_all(const V& mask) {
  std::int64_t words[sizeof mask / 8];
  std::memcpy(words, &mask, sizeof mask);
  std::int64_t all = -1;
  for (const std::int64_t word : words) all &= word;
  return all == -1;
}

// Return lane i of a vector. Paired lanes store even and odd lanes in separate vectors.
template <typename L>
auto& lane_of(typename L::Vector& v, int i) {
  auto* partials = reinterpret_cast<typename L::Partial*>(&v);
  return partials[PairedLanes<L> ? i % 2 * (L::kLanes / 2) + i / 2 : i];
}

// Round to the partial type of L. is_last: rounding to elements follows, so round to odd.
template <typename L>
typename L::Partial rounded(const ExactSum& sum, bool is_last) {
  if constexpr (sizeof(typename L::Partial) == 8) {
    return sum.rounded();
  } else {
    const double exact = sum.rounded_to_odd();
    const bool to_odd = sizeof(typename L::Element) == 2 && is_last;
    return to_odd ? round_to_odd(exact) : static_cast<float>(exact);
  }
}

// Recompute the lanes that have no proof of exactness; vector(r) is the vector of source r.
template <typename L, typename Vector>
__attribute__((noinline)) void add_again(typename L::Vector* result, const SumOf<L>& fast,
                                         int num_sources, bool is_last, Vector&& vector) {
  for (int lane = 0; lane < L::kLanes; ++lane) {
    if (fast.is_proved(lane)) continue;
    ExactSum sum;
    for (int r = 0; r < num_sources; ++r) {
      typename L::Vector x = vector(r);
      sum.add(lane_of<L>(x, lane));
    }
    lane_of<L>(*result, lane) = rounded<L>(sum, is_last);
  }
}

struct InExactOrder {
  template <typename L>
  static constexpr int kVectors = 2;  // vectors per source, with up to three registers of sums each

  template <typename L, typename Op, int kCount, typename Load>
  static PYRINGAR_INLINE void fold(typename L::Vector (&result)[kCount], int num_sources,
                                   bool is_divided, Load&& load) {
    SumOf<L> sums[kCount];
    for (int u = 0; u < kCount; ++u) sums[u].begin(load(0, u));
    for (int r = 1; r < num_sources; ++r) {
      for (int u = 0; u < kCount; ++u) sums[u].add(load(r, u));
    }
    auto proof = sums[0].proof();
    for (int u = 0; u < kCount; ++u) {
      result[u] = sums[u].result();
      proof &= sums[u].proof();
    }
    if (are_all(proof)) [[likely]]
      return;
    for (int u = 0; u < kCount; ++u) {
      add_again<L>(&result[u], sums[u], num_sources, !is_divided,
                   [&](int r) { return load(r, u); });
    }
  }
};

// A sum of two numbers needs no proof: one addition in the partial type is correctly rounded.
template <typename L>
void exact_kernel(const void* const* sources, int num_sources, void* const* destinations,
                  int num_destinations, std::size_t n, int divisor) {
  const FusedKernel kernel =
      num_sources <= 2 ? &fused_kernel<L, Sum, InRankOrder> : &fused_kernel<L, Sum, InExactOrder>;
  kernel(sources, num_sources, destinations, num_destinations, n, divisor);
}

}  // namespace

FusedKernel exact_kernel(DType dtype) {
  return with_dtype(dtype, []<DType kDType>() -> FusedKernel {
    if constexpr (is_float(kDType)) {
      return &exact_kernel<FusedLanesOf<kDType>>;
    } else {
      return nullptr;
    }
  });
}

}  // namespace pyringar
