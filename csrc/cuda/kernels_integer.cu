// kernels_integer: the kernels for integers.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels_impl.cuh"

namespace pyringar::cuda {

const void* integer_kernel(DType dtype, ReduceOp op, KernelKind kind) {
  switch (dtype) {
    case DType::kInt8:
      return kernel_of<DType::kInt8>(op, kind);
    case DType::kUInt8:
      return kernel_of<DType::kUInt8>(op, kind);
    case DType::kInt32:
      return kernel_of<DType::kInt32>(op, kind);
    case DType::kInt64:
      return kernel_of<DType::kInt64>(op, kind);
    default:
      return nullptr;
  }
}

}  // namespace pyringar::cuda
