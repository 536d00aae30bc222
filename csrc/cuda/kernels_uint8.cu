// kernels_uint8: the kernels for uint8.
//
// Tests     see cuda/kernels.h

#include "cuda/kernels_impl.cuh"

namespace pyringar::cuda {

template const void* kernel_of<DType::kUInt8>(const Fold& fold, KernelKind kind);

}  // namespace pyringar::cuda
