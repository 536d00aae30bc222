// fold: the operation and the order in which the elements of all ranks are reduced.
// Contract  x[r] is the element of rank r, widened to the type of partial sums (core/dtype.h).
//             rank    ((x[0] + x[1]) + x[2]) + ...
//             tree    T(0, k), see core/tree.h
//             exact   the real number x[0] + x[1] + ..., rounded once (for a sum to the element's
//                     type, for a mean to the type of partial sums)
//           A mean then divides once. Then the result is rounded to the element's type. Integer
//           sums wrap and are the same in every order.
// Tests     tests/conformance/test_bits.py repeats each equation in Python
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/schedule.h"

namespace pyringar {

// The type in which T is added. Integers wrap, and signed overflow is undefined in C++, so integers
// are added as unsigned types. 8-bit types use unsigned int: C++ would promote them to int.
template <typename T>
struct Wrapping {
  using type = T;
};
template <typename T>
  requires std::is_integral_v<T>
struct Wrapping<T> {
  using type = decltype(1u * std::make_unsigned_t<T>());
};

// Reductions of two elements or vectors: a is the partial, b the element of the next rank.
struct Sum {
  template <typename T>
  static PYRINGAR_HD_INLINE T apply(T a, T b) {
    using W = typename Wrapping<T>::type;
    return (T)((W)a + (W)b);
  }
};

struct Prod {
  template <typename T>
  static PYRINGAR_HD_INLINE T apply(T a, T b) {
    using W = typename Wrapping<T>::type;
    return (T)((W)a * (W)b);
  }
};

// If an operand is NaN the result is NaN, as in torch.maximum. If both are equal the result is b.
struct Max {
  template <typename T>
  static PYRINGAR_HD_INLINE T apply(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

struct Min {
  template <typename T>
  static PYRINGAR_HD_INLINE T apply(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};

enum class Order : std::uint8_t { kRank, kTree, kExact };
inline constexpr int kNumOrders = 3;

constexpr const char* order_name(Order order) {
  constexpr const char* kNames[kNumOrders] = {"rank", "tree", "exact"};
  return kNames[static_cast<int>(order)];
}

constexpr bool has_order(ReduceOp op, Order order) {
  return order != Order::kExact || op == ReduceOp::kSum || op == ReduceOp::kMean;
}

struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  Order order = Order::kRank;

  bool operator==(const Reduction&) const = default;
};

// The divisor of a mean. GPU kernels use the reciprocal, which is exact for powers of two.
struct Divisor {
  std::int32_t value = 1;
  double reciprocal = 1;

  static Divisor of(int value) { return {value, 1.0 / value}; }
};

struct Fold {
  ReduceOp op = ReduceOp::kSum;
  int divisor = 1;
  Order order = Order::kRank;

  static Fold of(Reduction reduction, int world_size) {
    return {reduction.op, reduction.op == ReduceOp::kMean ? world_size : 1, reduction.order};
  }
};

}  // namespace pyringar
