// kernels: the loops of each dtype, and which file has those of another order.
//
// Tests     tests/conformance/test_bits.py

#include "cpu/kernels.h"

#include "cpu/kernels_impl.h"

namespace pyringar {

const Kernels& kernels(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat64:
      return kernels_of<DType::kFloat64>(op);
    case DType::kFloat32:
      return kernels_of<DType::kFloat32>(op);
    case DType::kFloat16:
      return kernels_of<DType::kFloat16>(op);
    case DType::kBFloat16:
      return kernels_of<DType::kBFloat16>(op);
    case DType::kInt8:
      return kernels_of<DType::kInt8>(op);
    case DType::kUInt8:
      return kernels_of<DType::kUInt8>(op);
    case DType::kInt32:
      return kernels_of<DType::kInt32>(op);
    case DType::kInt64:
      break;
  }
  return kernels_of<DType::kInt64>(op);
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
