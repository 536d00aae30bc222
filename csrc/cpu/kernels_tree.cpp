// kernels_tree: the fused loop that adds in the order of core/tree.h, for floats.
//
// Tests     tests/test_orders.py

#include "core/tree.h"
#include "cpu/kernels_impl.h"

namespace pyringar {

namespace {

constexpr int kSlots = 28;  // for 2^31 sources

// Trees of kNum leaves, a vector at a time, so that all of it is in registers; 0: of any number,
// where sums wait in memory, and longer stretches of a source make up for the loops.
template <int kNum>
struct InTree {
  template <typename L>
  static constexpr int kVectors = kNum == 0 ? 8 : kUnroll<L>;

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
      Vector waiting[kSlots][kCount];
      const auto slot = [&](int i) PYRINGAR_INLINE_LAMBDA { return i == 0 ? sum : waiting[i]; };
      tree_of_any(num_sources, [&](int lo, int num, int to, int end) PYRINGAR_INLINE_LAMBDA {
        for (int u = 0; u < kCount; ++u) {
          Vector total = tree_of_few(lo, num, leaf_at(u), add);
          for (int i = end; i > to; --i) total = add(slot(i - 1)[u], total);
          slot(to)[u] = total;
        }
      });
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
    case 16:
      return run(&fused_kernel<L, Op, InTree<16>>);
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
