// kernels_float16: the kernels for fp16.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels_impl.cuh"

namespace pyringar::cuda {

template const void* kernel_of<DType::kFloat16>(const Fold& fold, KernelKind kind);

}  // namespace pyringar::cuda
