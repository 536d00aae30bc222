// kernels_float32: the kernels for fp32.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels_impl.cuh"

namespace pyringar::cuda {

template const void* kernel_of<DType::kFloat32>(const Fold& fold, KernelKind kind);

}  // namespace pyringar::cuda
