// fold: how the elements of all ranks become one: by which operation, and in which order.
//
// Contract  With x[r] the element of rank r, widened to the type of partial sums (core/dtype.h):
//             rank    ((x[0] + x[1]) + x[2]) + ...
//             tree    T(0, k), see core/tree.h
//             exact   the real number x[0] + x[1] + ..., rounded
//           then, for a mean, one division, and one rounding to the element's type. An exact sum is
//           rounded to that type at once. Sums of integers wrap, and are the same in every order.
// Tests     tests/conformance/test_bits.py has each equation once more, in Python
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/dtype.h"
#include "core/schedule.h"

namespace pyringar {

// The type in which T is added. Integers wrap, and signed overflow is not defined: they are added
// without a sign, small ones as unsigned, since they would be promoted to int.
template <typename T>
struct Wrapping {
  using type = T;
};
template <typename T>
  requires std::is_integral_v<T>
struct Wrapping<T> {
  using type = decltype(1u * std::make_unsigned_t<T>());
};

// Reductions of two elements, or vectors of them: "a" is the partial, "b" the next rank's element.
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

// A NaN on either side wins, as in torch.maximum; of two equal numbers (0 and -0) the later one.
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

// What a kernel divides by, without a division: the reciprocal of a power of two is exact.
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
