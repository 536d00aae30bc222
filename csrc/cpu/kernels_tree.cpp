// kernels_tree: the fused loop that adds in the order of core/tree.h, for floats.
//
// Tests     tests/test_orders.py

#include "core/tree.h"
#include "cpu/kernels_impl.h"

namespace pyringar {

namespace {

constexpr int kMostWaiting = 29;  // for 2^31 sources

// Trees of kNum leaves; 0: of any number. A vector at a time, so that all of it is in registers.
template <int kNum>
struct InTree {
  template <typename L>
  static constexpr int kVectors = kUnroll<L>;

  template <typename L, typename Op, int kCount, typename Load>
  static PYRINGAR_INLINE void fold(typename L::Vector (&sum)[kCount], int num_sources, bool,
                                   Load&& load) {
    using Vector = typename L::Vector;
    const auto add = [](const Vector& a, const Vector& b)
                         PYRINGAR_INLINE_LAMBDA { return combine<L, Op>(a, b); };
    const auto leaf_at = [&](int u) PYRINGAR_INLINE_LAMBDA {
      return [&load, u](int r) PYRINGAR_INLINE_LAMBDA { return load(r, u); };
    };
    if constexpr (kNum > 0) {
      for (int u = 0; u < kCount; ++u) sum[u] = tree_of<kNum>(0, leaf_at(u), add);
    } else {
      using Vectors = Vector[kCount];
      Vectors waiting[kMostWaiting];
      const auto few = [&](Vectors& sums, int lo, int num) PYRINGAR_INLINE_LAMBDA {
        if (num == kTreeGroup) {
          for (int u = 0; u < kCount; ++u) sums[u] = tree_of<kTreeGroup>(lo, leaf_at(u), add);
        } else {
          for (int u = 0; u < kCount; ++u) sums[u] = tree_of_few(lo, num, leaf_at(u), add);
        }
      };
      const auto add_all = [&](Vectors& left, const Vectors& right) PYRINGAR_INLINE_LAMBDA {
        for (int u = 0; u < kCount; ++u) left[u] = add(left[u], right[u]);
      };
      tree_of_any(waiting, num_sources, few, add_all);
      for (int u = 0; u < kCount; ++u) sum[u] = waiting[0][u];
    }
  }
};

template <typename L, typename Op>
void tree_kernel(const void* const* sources, int num_sources, void* const* destinations,
                 int num_destinations, std::size_t n, int divisor) {
  const auto run = [&](FusedKernel kernel) {
    kernel(sources, num_sources, destinations, num_destinations, n, divisor);
  };
  switch (num_sources) {
    case 1:
    case 2:
    case 3:  // also a left fold
      return run(&fused_kernel<L, Op, InRankOrder>);
    case 4:
      return run(&fused_kernel<L, Op, InTree<4>>);
    case 5:
      return run(&fused_kernel<L, Op, InTree<5>>);
    case 6:
      return run(&fused_kernel<L, Op, InTree<6>>);
    case 7:
      return run(&fused_kernel<L, Op, InTree<7>>);
    case 8:
      return run(&fused_kernel<L, Op, InTree<8>>);
    default:
      return run(&fused_kernel<L, Op, InTree<0>>);
  }
}

template <DType dtype>
FusedKernel kernel_of(ReduceOp op) {
  using L = FusedLanesOf<dtype>;
  return op == ReduceOp::kProd ? &tree_kernel<L, Prod> : &tree_kernel<L, Sum>;
}

}  // namespace

FusedKernel tree_kernel(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat64:
      return kernel_of<DType::kFloat64>(op);
    case DType::kFloat32:
      return kernel_of<DType::kFloat32>(op);
    case DType::kFloat16:
      return kernel_of<DType::kFloat16>(op);
    default:
      return kernel_of<DType::kBFloat16>(op);
  }
}

}  // namespace pyringar
