// kernels_impl: the kernels of one dtype, for the kernels_*.cu files.
//
// Floor     cuda: host side of device code.
// Tests     see cuda/kernels.h
#pragma once

#include "cuda/fused.cuh"
#include "cuda/kernels.h"
#include "cuda/ring.cuh"

namespace pyringar::cuda {

template <typename E, typename Op>
const void* kernel_for(KernelKind kind) {
  switch (kind) {
    case KernelKind::kFusedSmall:
      return reinterpret_cast<const void*>(&fused_kernel<E, Op, SmallTable>);
    case KernelKind::kFusedMiddle:
      return reinterpret_cast<const void*>(&fused_kernel<E, Op, MiddleTable>);
    case KernelKind::kFusedLarge:
      return reinterpret_cast<const void*>(&fused_kernel<E, Op, LargeTable>);
    case KernelKind::kRing:
      return reinterpret_cast<const void*>(&ring_kernel<E, Op>);
  }
  return nullptr;
}

template <DType dtype>
const void* kernel_of(ReduceOp op, KernelKind kind) {
  using E = ElementOf<dtype>;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      return kernel_for<E, Sum>(kind);
    case ReduceOp::kMax:
      return kernel_for<E, Max>(kind);
    case ReduceOp::kMin:
      return kernel_for<E, Min>(kind);
    case ReduceOp::kProd:
      return kernel_for<E, Prod>(kind);
  }
  return nullptr;
}

}  // namespace pyringar::cuda
