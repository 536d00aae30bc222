// launched: what a launch on a fake CUDA runtime asks for.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "cuda/kernels.h"

namespace pyringar::stress {

// None: not a kernel of the engine.
inline std::optional<cuda::KernelKind> kind_of(const void* kernel) {
  for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
    for (int op = 0; op < kNumReduceOps; ++op) {
      for (int kind = 0; kind < cuda::kNumKernelKinds; ++kind) {
        const auto k = static_cast<cuda::KernelKind>(kind);
        if (cuda::kernel_function(static_cast<DType>(dtype), static_cast<ReduceOp>(op), k) ==
            kernel) {
          return k;
        }
      }
    }
  }
  return {};
}

// The call, its arguments copied now, as a launch does.
template <typename... Arguments>
std::function<void()> bound(const void* kernel, void** from) {
  using Kernel = void (*)(Arguments...);
  const auto function = reinterpret_cast<Kernel>(const_cast<void*>(kernel));
  const auto copied = [&]<std::size_t... i>(std::index_sequence<i...>) {
    return std::make_shared<std::tuple<Arguments...>>(*static_cast<Arguments*>(from[i])...);
  }(std::index_sequence_for<Arguments...>{});
  return [function, copied] { std::apply(function, *copied); };
}

}  // namespace pyringar::stress
