// kernels: from dtype to the file that holds its kernels.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels.h"

namespace pyringar::cuda {

const void* kernel_function(DType dtype, const Fold& fold, KernelKind kind) {
  switch (dtype) {
    case DType::kFloat64:
      return kernel_of<DType::kFloat64>(fold, kind);
    case DType::kFloat32:
      return kernel_of<DType::kFloat32>(fold, kind);
    case DType::kFloat16:
      return kernel_of<DType::kFloat16>(fold, kind);
    case DType::kBFloat16:
      return kernel_of<DType::kBFloat16>(fold, kind);
    case DType::kInt8:
      return kernel_of<DType::kInt8>(fold, kind);
    case DType::kUInt8:
      return kernel_of<DType::kUInt8>(fold, kind);
    case DType::kInt32:
      return kernel_of<DType::kInt32>(fold, kind);
    case DType::kInt64:
      return kernel_of<DType::kInt64>(fold, kind);
  }
  return nullptr;
}

}  // namespace pyringar::cuda
