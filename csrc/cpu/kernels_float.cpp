// kernels_float: the loops of cpu/kernels.h for fp32 and fp64.
//
// Tests     tests/conformance/test_bits.py

#include "cpu/kernels_impl.h"

namespace pyringar {

const Kernels& float_kernels(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat64:
      return kernels_of<DType::kFloat64>(op);
    case DType::kFloat32:
      return kernels_of<DType::kFloat32>(op);
    default:
      return kernels(dtype, op);
  }
}

}  // namespace pyringar
