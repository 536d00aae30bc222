// kernels: from a dtype to the unit that holds its kernels. Not in the header: nvcc would then
// compile the kernels of all dtypes in each unit.

#include "cuda/kernels.h"

namespace pyringar::cuda {

const void* kernel_function(DType dtype, const Fold& fold, KernelKind kind) {
  return with_dtype(dtype, [&]<DType kDType>() { return kernel_of<kDType>(fold, kind); });
}

}  // namespace pyringar::cuda
