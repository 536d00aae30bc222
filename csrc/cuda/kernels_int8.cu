// kernels_int8: the kernels for int8.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels_impl.cuh"

namespace pyringar::cuda {

template const void* kernel_of<DType::kInt8>(const Fold& fold, KernelKind kind);

}  // namespace pyringar::cuda
