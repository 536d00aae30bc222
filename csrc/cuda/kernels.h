// kernels: the kernel for a dtype, an operation and an order, for hosts that launch it.
//
// Contract  Kernel argument: SmallTable for kFusedSmall, LargeTable for kFusedLarge, RingArgs for
//           kRing.
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

// Return the function for cudaLaunchKernel. A ring ignores fold.order. Exact sums have no kernel.
const void* kernel_function(DType dtype, const Fold& fold, KernelKind kind);

}  // namespace pyringar::cuda
