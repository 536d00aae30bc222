// kernels_float64: the kernels for fp64.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels_impl.cuh"

namespace pyringar::cuda {

template const void* kernel_of<DType::kFloat64>(const Fold& fold, KernelKind kind);

}  // namespace pyringar::cuda
