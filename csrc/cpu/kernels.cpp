// kernels: the loops of each dtype, and which file has those of another order.

#include "cpu/kernels.h"

#include "cpu/kernels_impl.h"

namespace pyringar {

const Kernels& kernels(DType dtype, ReduceOp op) {
  return with_dtype(dtype,
                    [op]<DType kDType>() -> const Kernels& { return kernels_of<kDType>(op); });
}

FusedKernel fused_kernel(DType dtype, const Fold& fold) {
  // What is the same in every order goes in that of ranks.
  const bool is_selection = fold.op == ReduceOp::kMax || fold.op == ReduceOp::kMin;
  if (fold.order != Order::kRank && is_float(dtype) && !is_selection) {
    return fold.order == Order::kTree ? tree_kernel(dtype, fold.op) : exact_kernel(dtype);
  }
  return kernels(dtype, fold.op).fused;
}

}  // namespace pyringar
