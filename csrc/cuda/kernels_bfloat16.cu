// kernels_bfloat16: the kernels for bf16.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels_impl.cuh"

namespace pyringar::cuda {

template const void* kernel_of<DType::kBFloat16>(const Fold& fold, KernelKind kind);

}  // namespace pyringar::cuda
