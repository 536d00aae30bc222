// kernels_half: the loops of cpu/kernels.h for fp16 and bf16.
//
// Tests     tests/conformance/test_bits.py

#include "cpu/kernels_impl.h"

namespace pyringar {

const Kernels& half_kernels(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat16:
      return kernels_of<DType::kFloat16>(op);
    case DType::kBFloat16:
      return kernels_of<DType::kBFloat16>(op);
    default:
      return kernels(dtype, op);
  }
}

}  // namespace pyringar
