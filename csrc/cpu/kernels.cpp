// kernels: which file holds the loops of which dtype.
//
// Tests     tests/conformance/test_bits.py

#include "cpu/kernels.h"

namespace pyringar {

const Kernels& kernels(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kFloat32:
      return float_kernels(dtype, op);
    case DType::kFloat16:
    case DType::kBFloat16:
      return half_kernels(dtype, op);
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kInt32:
    case DType::kInt64:
      break;
  }
  return integer_kernels(dtype, op);
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
