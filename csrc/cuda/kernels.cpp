// kernels: from dtype to the file that holds its kernels.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels.h"

namespace pyringar::cuda {

const void* kernel_function(DType dtype, ReduceOp op, KernelKind kind) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kFloat32:
      return float_kernel(dtype, op, kind);
    case DType::kFloat16:
    case DType::kBFloat16:
      return half_kernel(dtype, op, kind);
    default:
      return integer_kernel(dtype, op, kind);
  }
}

}  // namespace pyringar::cuda
