// kernels: which kernel runs a dtype and a reduction, for hosts that launch it.
//
// Contract  the argument of each kind: fused a table of cuda/table.h, ring RingArgs.
// Tests     tests/build/test_cuda_kernels.py reads registers and SASS, tests/cuda runs them
#pragma once

#include "core/fold.h"
#include "cuda/table.h"

namespace pyringar::cuda {

enum class KernelKind { kFusedSmall, kFusedLarge, kRing };
inline constexpr int kNumKernelKinds = 3;

template <typename T>
inline constexpr KernelKind kFusedWith = KernelKind::kFusedLarge;
template <>
inline constexpr KernelKind kFusedWith<SmallTable> = KernelKind::kFusedSmall;

template <DType dtype>
const void* kernel_of(const Fold& fold, KernelKind kind);

// For cudaLaunchKernel. A ring ignores the order of the fold. Callers refuse exact sums.
const void* kernel_function(DType dtype, const Fold& fold, KernelKind kind);

}  // namespace pyringar::cuda
