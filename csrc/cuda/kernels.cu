// kernels: all kernels of the dtype PYRINGAR_DTYPE. nvcc compiles this file once per dtype.
#include "cuda/kernels.h"

#include "cuda/fused.cuh"
#include "cuda/ring.cuh"

namespace pyringar::cuda {

namespace {

template <typename E, typename Op, typename T>
const void* fused_for(Order order) {
  // Only floating-point sums, means and products depend on the order.
  constexpr bool kHasTrees = std::is_floating_point_v<typename E::Partial> &&
                             (std::is_base_of_v<Sum, Op> || std::is_same_v<Op, Prod>);
  if constexpr (kHasTrees) {
    if (order == Order::kTree) return reinterpret_cast<const void*>(&tree_kernel<E, Op, T>);
  }
  return reinterpret_cast<const void*>(&fused_kernel<E, Op, T>);
}

template <typename E, typename Op>
const void* kernel_for(Order order, KernelKind kind) {
  switch (kind) {
    case KernelKind::kFusedSmall:
      return fused_for<E, Op, SmallTable>(order);
    case KernelKind::kFusedLarge:
      return fused_for<E, Op, LargeTable>(order);
    case KernelKind::kRing:
      if constexpr (!std::is_same_v<Op, Mean>) {
        return reinterpret_cast<const void*>(&ring_kernel<E, Op>);
      }
  }
  return nullptr;
}

// True if results must be divided: multiplying by the reciprocal would give other bits.
template <typename E>
bool divides(const Fold& fold) {
  const bool is_power_of_two = (fold.divisor & (fold.divisor - 1)) == 0;
  return fold.divisor != 1 && !(std::is_floating_point_v<typename E::Partial> && is_power_of_two);
}

}  // namespace

template <DType dtype>
const void* kernel_of(const Fold& fold, KernelKind kind) {
  using E = ElementOf<dtype>;
  const Order order = fold.order;
  switch (fold.op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      if (kind != KernelKind::kRing && divides<E>(fold)) return kernel_for<E, Mean>(order, kind);
      return kernel_for<E, Sum>(order, kind);
    case ReduceOp::kMax:
      return kernel_for<E, Max>(order, kind);
    case ReduceOp::kMin:
      return kernel_for<E, Min>(order, kind);
    case ReduceOp::kProd:
      return kernel_for<E, Prod>(order, kind);
  }
  return nullptr;
}

template const void* kernel_of<DType::PYRINGAR_DTYPE>(const Fold& fold, KernelKind kind);

}  // namespace pyringar::cuda
