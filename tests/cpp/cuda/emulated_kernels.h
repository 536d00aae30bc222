// emulated_kernels: launches of emulated kernels by dtype and reduction.
#pragma once

#include "core/fold.h"
#include "cuda/kernels.h"
#include "cuda_emulator.h"
#include "oracle.h"

namespace pyringar::stress {

template <typename... Arguments>
auto kernel_of(DType dtype, const Fold& fold, cuda::KernelKind kind) {
  using Kernel = void (*)(Arguments...);
  return reinterpret_cast<Kernel>(const_cast<void*>(cuda::kernel_function(dtype, fold, kind)));
}

}  // namespace pyringar::stress
