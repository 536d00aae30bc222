// kernels: which kernel runs a dtype and a reduction, for hosts that launch it.
//
// Contract  the arguments of each kind, in order: fused (table), direct (table, BarrierPorts,
//           Patience), ring (RingArgs); the tables are those of cuda/table.h.
// Threads   pure functions, any.
// Tests     tests/build/test_cuda_build.py reads registers and SASS, tests/cuda runs them
#pragma once

#include "core/dtype.h"

namespace pyringar::cuda {

enum class KernelKind { kFusedSmall, kFusedLarge, kDirectSmall, kDirectLarge, kRing };
inline constexpr int kNumKernelKinds = 5;

// What cudaLaunchKernel and cudaLaunchCooperativeKernel take.
const void* kernel_function(DType dtype, ReduceOp op, KernelKind kind);

// A file per kind of element: nvcc compiles them side by side.
const void* float_kernel(DType dtype, ReduceOp op, KernelKind kind);
const void* half_kernel(DType dtype, ReduceOp op, KernelKind kind);
const void* integer_kernel(DType dtype, ReduceOp op, KernelKind kind);

}  // namespace pyringar::cuda
