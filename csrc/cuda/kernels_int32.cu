// kernels_int32: the kernels for int32.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels_impl.cuh"

namespace pyringar::cuda {

template const void* kernel_of<DType::kInt32>(const Fold& fold, KernelKind kind);

}  // namespace pyringar::cuda
