// kernels: from dtype to the file that holds its kernels.

#include "cuda/kernels.h"

namespace pyringar::cuda {

const void* kernel_function(DType dtype, const Fold& fold, KernelKind kind) {
  return with_dtype(dtype, [&]<DType kDType>() { return kernel_of<kDType>(fold, kind); });
}

}  // namespace pyringar::cuda
