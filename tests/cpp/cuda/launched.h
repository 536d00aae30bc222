// launched: what a launch on a modelled CUDA runtime asks for.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "cuda/kernels.h"
#include "cuda/table.h"

namespace pyringar::stress {

struct Identity {
  DType dtype;
  cuda::KernelKind kind;
};

// None: not a kernel of the engine.
inline std::optional<Identity> identify(const void* kernel) {
  for (int d = 0; d < kNumDTypes; ++d) {
    for (int op = 0; op < kNumReduceOps; ++op) {
      for (int k = 0; k < cuda::kNumKernelKinds; ++k) {
        const auto dtype = static_cast<DType>(d);
        const auto kind = static_cast<cuda::KernelKind>(k);
        for (const Order order : {Order::kRank, Order::kTree}) {
          for (const int divisor : {1, 3}) {  // means by 3 have kernels of their own
            const Fold fold{static_cast<ReduceOp>(op), divisor, order};
            if (cuda::kernel_function(dtype, fold, kind) == kernel) return Identity{dtype, kind};
          }
        }
      }
    }
  }
  return {};
}

inline const char* kind_name(cuda::KernelKind kind) {
  return kind == cuda::KernelKind::kRing ? "ring" : "fused";
}

// visit(std::type_identity<T>), T being the table that a fused kernel of this kind takes.
template <typename Visit>
void with_table(cuda::KernelKind kind, Visit&& visit) {
  if (kind == cuda::KernelKind::kFusedSmall) {
    visit(std::type_identity<cuda::SmallTable>{});
  } else {
    visit(std::type_identity<cuda::LargeTable>{});
  }
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
