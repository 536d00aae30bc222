// kernels_float: the kernels for fp64 and fp32.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels_impl.cuh"

namespace pyringar::cuda {

const void* float_kernel(DType dtype, ReduceOp op, KernelKind kind) {
  switch (dtype) {
    case DType::kFloat64:
      return kernel_of<DType::kFloat64>(op, kind);
    case DType::kFloat32:
      return kernel_of<DType::kFloat32>(op, kind);
    default:
      return nullptr;
  }
}

}  // namespace pyringar::cuda
