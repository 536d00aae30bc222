// kernels_half: the kernels for fp16 and bf16.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels_impl.cuh"

namespace pyringar::cuda {

const void* half_kernel(DType dtype, ReduceOp op, KernelKind kind) {
  switch (dtype) {
    case DType::kFloat16:
      return kernel_of<DType::kFloat16>(op, kind);
    case DType::kBFloat16:
      return kernel_of<DType::kBFloat16>(op, kind);
    default:
      return nullptr;
  }
}

}  // namespace pyringar::cuda
