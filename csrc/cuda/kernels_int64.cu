// kernels_int64: the kernels for int64.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels_impl.cuh"

namespace pyringar::cuda {

template const void* kernel_of<DType::kInt64>(const Fold& fold, KernelKind kind);

}  // namespace pyringar::cuda
