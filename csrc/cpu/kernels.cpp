// kernels: instantiates the loops for each dtype and reduction, in rank order and tree order.
#include "cpu/kernels.h"

#include <iterator>
#include <utility>

#include "core/tree.h"
#include "cpu/kernels_impl.h"

namespace pyringar {

namespace {

constexpr int kSlots = 28;     // partial sums in memory; enough for 2^31 sources
constexpr int kMaxFixed = 16;  // most sources for which each number has a loop without branches

// Keep the compiler from reordering computations, which would need more registers.
template <typename V>
PYRINGAR_INLINE void keep_in_place(V& v) {
#if defined(__x86_64__)
  __asm__ __volatile__("" : "+v"(v));
#elif defined(__aarch64__)
  __asm__ __volatile__("" : "+w"(v));
#endif
}
PYRINGAR_INLINE void keep_in_place(BFloat16PairLanes::Vector& v) {
  keep_in_place(v.even);
  keep_in_place(v.odd);
}

// Add kNum sources in tree order, with partial sums in registers. kNum 0: any number of sources,
// with partial sums in memory. A leaf holds all vectors of one source in a block.
template <int kNum>
struct InTreeOrder {
  template <typename L>
  static constexpr int kVectors = PairedLanes<L> ? 2 : kUnroll<L>;  // per source: four registers

  template <typename L, typename Op, int kCount, typename Load>
  static PYRINGAR_INLINE void fold(typename L::Vector (&sum)[kCount], int num_sources, bool,
                                   Load&& load) {
    struct Leaf {
      typename L::Vector v[kCount];
    };
    const auto leaf = [&](int r) PYRINGAR_INLINE_LAMBDA {
      Leaf x;
      for (int u = 0; u < kCount; ++u) x.v[u] = load(r, u);
      return x;
    };
    const auto add = [](const Leaf& a, const Leaf& b) PYRINGAR_INLINE_LAMBDA {
      Leaf x;
      for (int u = 0; u < kCount; ++u) {
        auto v = combine<L, Op>(a.v[u], b.v[u]);
        keep_in_place(v);
        x.v[u] = v;
      }
      return x;
    };
    Leaf total;
    if constexpr (kNum > 0) {
      total = tree_of<kNum>(0, leaf, add);
    } else {
      Leaf waiting[kSlots];
      tree_of_any<kTreeGroup>(num_sources,
                              [&](int lo, int num, int to, int end) PYRINGAR_INLINE_LAMBDA {
                                total = tree_of_few(lo, num, leaf, add);
                                for (int i = end; i > to; --i) total = add(waiting[i - 1], total);
                                waiting[to] = total;
                              });
    }
    for (int u = 0; u < kCount; ++u) sum[u] = total.v[u];
  }
};

// For up to three sources tree order equals rank order.
template <int kNum>
using OrderFor = std::conditional_t<kNum >= 1 && kNum <= 3, InRankOrder, InTreeOrder<kNum>>;

template <typename L, typename Op, int... kNums>
constexpr FusedKernel with_loops_for(std::integer_sequence<int, kNums...>) {
  return [](const void* const* sources, int num_sources, void* const* destinations,
            int num_destinations, std::size_t n, int divisor) {
    static constexpr FusedKernel kKernels[] = {&fused_kernel<L, Op, OrderFor<kNums>>...};
    const bool is_fixed = num_sources < static_cast<int>(std::size(kKernels));
    kKernels[is_fixed ? num_sources : 0](sources, num_sources, destinations, num_destinations, n,
                                         divisor);
  };
}

template <DType dtype, typename Op>
constexpr Kernels kKernelsOf = {
    &fused_kernel<FusedLanesOf<dtype>, Op, InRankOrder>, &widen_kernel<LanesOf<dtype>>,
    &accumulate_kernel<LanesOf<dtype>, Op>, &finish_kernel<LanesOf<dtype>, Op>};

// Products are rare: loops for each number of sources above three would be a third of the build.
FusedKernel tree_kernel(DType dtype, ReduceOp op) {
  return with_dtype(dtype, [op]<DType kDType>() -> FusedKernel {
    if constexpr (is_float(kDType)) {
      using L = FusedLanesOf<kDType>;
      return op == ReduceOp::kProd
                 ? with_loops_for<L, Prod>(std::make_integer_sequence<int, 4>())
                 : with_loops_for<L, Sum>(std::make_integer_sequence<int, kMaxFixed + 1>());
    } else {
      return nullptr;
    }
  });
}

}  // namespace

const Kernels& kernels(DType dtype, ReduceOp op) {
  return with_dtype(dtype, [op]<DType kDType>() -> const Kernels& {
    switch (op) {
      case ReduceOp::kMax:
        return kKernelsOf<kDType, Max>;
      case ReduceOp::kMin:
        return kKernelsOf<kDType, Min>;
      case ReduceOp::kProd:
        return kKernelsOf<kDType, Prod>;
      default:
        return kKernelsOf<kDType, Sum>;
    }
  });
}

FusedKernel fused_kernel(DType dtype, const Fold& fold) {
  // Integers, max and min have the same result in each order.
  const bool is_selection = fold.op == ReduceOp::kMax || fold.op == ReduceOp::kMin;
  if (fold.order != Order::kRank && is_float(dtype) && !is_selection) {
    return fold.order == Order::kTree ? tree_kernel(dtype, fold.op) : exact_kernel(dtype);
  }
  return kernels(dtype, fold.op).fused;
}

}  // namespace pyringar
