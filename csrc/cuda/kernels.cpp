// kernels: dispatch by dtype. In the header, nvcc would compile all dtypes in each unit.
#include "cuda/kernels.h"

namespace pyringar::cuda {

const void* kernel_function(DType dtype, const Fold& fold, KernelKind kind) {
  return with_dtype(dtype, [&]<DType kDType>() { return kernel_of<kDType>(fold, kind); });
}

}  // namespace pyringar::cuda
