// kernels_exact: the fused loop of correctly rounded sums, for floats.
//
// Contract  core/fold.h, "exact". Vectors of partial sums prove as they go that they lost nothing;
//           lanes of which they cannot are added again, one by one, as core/exact_sum.h does.
// Cost      five operations for an addition of 16-bit floats, eleven for one of fp32 and fp64; a
//           hundred nanoseconds for an element that is added again: where exponents lie far apart
//           (a factor of 2^16 for bf16, of 2^13 above 1 for fp16, of 2^24 for fp32 and 2^53 for
//           fp64 of three ranks and more), or a number is infinite.
// Source    TwoSum: Knuth, "The Art of Computer Programming" 2, 4.2.2; a sum and the sum of its
//           errors: Ogita, Rump and Oishi 2005.
// Tests     tests/test_orders.py

#include "core/exact_sum.h"
#include "cpu/kernels_impl.h"

namespace pyringar {

namespace {

// a + b in a vector of floats, and whether that is exact: the larger of the two is taken away again
// without an error, so that one of these finds every loss.
template <typename V>
PYRINGAR_INLINE V add_exactly(V a, V b, decltype(V{} == V{})& is_exact) {
  const V sum = a + b;
  is_exact &= ((sum - a) == b) & ((sum - b) == a);
  return sum;
}

// Sums of 16-bit floats, in fp32.
template <typename V>
struct ShortSum {
  V sum;
  decltype(V{} == V{}) is_exact;

  PYRINGAR_INLINE void begin(V x) { sum = x, is_exact = V{} == V{}; }
  PYRINGAR_INLINE void add(V x) { sum = add_exactly(sum, x, is_exact); }
  PYRINGAR_INLINE V result() const { return sum; }
};

// Sums of fp32 or fp64, and of what they lose.
template <typename V>
struct LongSum {
  V sum;
  V errors;
  decltype(V{} == V{}) is_exact;

  PYRINGAR_INLINE void begin(V x) { sum = x, errors = V{}, is_exact = V{} == V{}; }
  PYRINGAR_INLINE void add(V x) {
    const V next = sum + x;
    const V of_x = next - sum;
    const V error = (sum - (next - of_x)) + (x - of_x);
    errors = add_exactly(errors, error, is_exact);
    sum = next;
  }
  PYRINGAR_INLINE V result() const { return errors == V{} ? sum : sum + errors; }  // -0 + 0 is 0
};

template <typename L>
struct SumOf : std::conditional_t<sizeof(typename L::Element) == 2, ShortSum<typename L::Vector>,
                                  LongSum<typename L::Vector>> {
  static constexpr int kLanes = L::kLanes;
  PYRINGAR_INLINE auto proof() const { return this->is_exact; }
  bool is_proved(int lane) const { return this->is_exact[lane] != 0; }
};

template <PairedLanes L>
struct SumOf<L> {
  using Vector = typename L::Vector;
  SumOf<typename L::Half> even;
  SumOf<typename L::Half> odd;

  PYRINGAR_INLINE void begin(Vector x) { even.begin(x.even), odd.begin(x.odd); }
  PYRINGAR_INLINE void add(Vector x) { even.add(x.even), odd.add(x.odd); }
  PYRINGAR_INLINE Vector result() const { return {even.result(), odd.result()}; }
  PYRINGAR_INLINE auto proof() const { return even.is_exact & odd.is_exact; }
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

// Lane i of a vector of partial sums; of pairs the even and the odd ones stand apart.
template <typename L>
auto& lane_of(typename L::Vector& v, int i) {
  auto* partials = reinterpret_cast<typename L::Partial*>(&v);
  return partials[PairedLanes<L> ? i % 2 * (L::kLanes / 2) + i / 2 : i];
}

// As partial sums of L are; is_last: they are rounded to elements next, as if that were the first
// time.
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

// Adds again the lanes that were not proved; vector(r) is that of source r.
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

struct Exactly {
  template <typename L>
  static constexpr int kVectors = 2;  // each has up to three registers of sums

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

// Of two numbers their sum in the type of partial sums has all bits that a rounding could need.
template <typename L>
void exact_kernel(const void* const* sources, int num_sources, void* const* destinations,
                  int num_destinations, std::size_t n, int divisor) {
  const FusedKernel kernel =
      num_sources <= 2 ? &fused_kernel<L, Sum, InRankOrder> : &fused_kernel<L, Sum, Exactly>;
  kernel(sources, num_sources, destinations, num_destinations, n, divisor);
}

template <DType dtype>
constexpr FusedKernel kKernelOf = &exact_kernel<FusedLanesOf<dtype>>;

}  // namespace

FusedKernel exact_kernel(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return kKernelOf<DType::kFloat64>;
    case DType::kFloat32:
      return kKernelOf<DType::kFloat32>;
    case DType::kFloat16:
      return kKernelOf<DType::kFloat16>;
    default:
      return kKernelOf<DType::kBFloat16>;
  }
}

}  // namespace pyringar
