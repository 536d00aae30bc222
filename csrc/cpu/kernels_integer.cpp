// kernels_integer: the loops of cpu/kernels.h for integers.
//
// Tests     tests/conformance/test_bits.py

#include "cpu/kernels_impl.h"

namespace pyringar {

const Kernels& integer_kernels(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kInt8:
      return kernels_of<DType::kInt8>(op);
    case DType::kUInt8:
      return kernels_of<DType::kUInt8>(op);
    case DType::kInt32:
      return kernels_of<DType::kInt32>(op);
    case DType::kInt64:
      return kernels_of<DType::kInt64>(op);
    default:
      return kernels(dtype, op);
  }
}

}  // namespace pyringar
