// kernels_impl: the loops over elements, as templates over lanes, reduction and order.
// Contract  See cpu/kernels.h. Full blocks and tails use the same vector instructions.
// Tests     tests/conformance/test_bits.py, tests/cpp/pool_test.cpp
#pragma once

#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/lanes.h"

namespace pyringar {

// Vectors in flight per source. Four hide the latency of additions. Types that widen and round have
// other work in between: two vectors of 64 bytes suffice and leave room for pending loads.
template <typename L>
inline constexpr int kUnroll =
    sizeof(typename L::Element) == sizeof(typename L::Partial) || kVectorBytes < 64 ? 4 : 2;

template <typename L>
concept PairedLanes = requires { typename L::Half; };

template <typename L, typename Op>
PYRINGAR_INLINE typename L::Vector combine(typename L::Vector a, typename L::Vector b) {
  if constexpr (PairedLanes<L>) {
    return {combine<typename L::Half, Op>(a.even, b.even),
            combine<typename L::Half, Op>(a.odd, b.odd)};
  } else {
    return Op::apply(a, b);
  }
}

// Not inlined, since no instruction divides a vector of integers.
template <typename L>
__attribute__((noinline)) void divide_integers(typename L::Vector* v, int divisor) {
  typename L::Partial lanes[L::kLanes];
  std::memcpy(lanes, v, sizeof lanes);
  for (auto& lane : lanes) lane = static_cast<typename L::Partial>(lane / divisor);
  std::memcpy(v, lanes, sizeof lanes);
}

// Divide if Op is Sum: a mean is a sum with a divisor, and no other reduction divides.
template <typename L, typename Op>
PYRINGAR_INLINE typename L::Vector divided(typename L::Vector v, int divisor) {
  if constexpr (PairedLanes<L>) {
    return {divided<typename L::Half, Op>(v.even, divisor),
            divided<typename L::Half, Op>(v.odd, divisor)};
  } else if constexpr (std::is_same_v<Op, Sum>) {
    if (divisor != 1) {
      if constexpr (std::is_integral_v<typename L::Partial>) {
        divide_integers<L>(&v, divisor);
      } else {
        v = v / static_cast<typename L::Partial>(divisor);
      }
    }
  }
  return v;
}

// Call block(begin) for full blocks of kCount vectors, then tail(begin, count) for the rest.
template <typename L, int kCount, typename Block, typename Tail>
PYRINGAR_INLINE void for_each_block(std::size_t n, Block&& block, Tail&& tail) {
  constexpr std::size_t kBlock = std::size_t{kCount} * L::kLanes;
  std::size_t i = 0;
  for (; i + kBlock <= n; i += kBlock) block(i);
  for (; i < n; i += L::kLanes) tail(i, std::min<std::size_t>(L::kLanes, n - i));
}

template <typename L>
PYRINGAR_INLINE typename L::Vector load_some(const typename L::Element* from, std::size_t count) {
  typename L::Element padded[L::kLanes] = {};
  std::memcpy(padded, from, count * sizeof padded[0]);
  return L::load(padded);
}

template <typename L>
PYRINGAR_INLINE void store_some(typename L::Vector v, typename L::Element* to, std::size_t count) {
  const typename L::Packed packed = L::pack(v);
  std::memcpy(to, &packed, count * sizeof *to);
}

// Left fold of the sources. load(r, u) returns vector u of source r. The unnamed flag, used by
// other orders, says that a division follows.
struct InRankOrder {
  template <typename L>
  static constexpr int kVectors = kUnroll<L>;

  template <typename L, typename Op, int kCount, typename Load>
  static PYRINGAR_INLINE void fold(typename L::Vector (&sum)[kCount], int num_sources, bool,
                                   Load&& load) {
    for (int u = 0; u < kCount; ++u) sum[u] = load(0, u);
    for (int r = 1; r < num_sources; ++r) {
      for (int u = 0; u < kCount; ++u) sum[u] = combine<L, Op>(sum[u], load(r, u));
    }
  }
};

template <typename L, typename Op, typename FoldOrder>
void fused_kernel(const void* const* sources, int num_sources, void* const* destinations,
                  int num_destinations, std::size_t n, int divisor) {
  using Element = typename L::Element;
  using Vector = typename L::Vector;
  const auto source = [&](int r) { return static_cast<const Element*>(sources[r]); };
  const auto destination = [&](int r) { return static_cast<Element*>(destinations[r]); };
  constexpr int kCount = FoldOrder::template kVectors<L>;
  // Must be inlined: a called lambda would read each pointer through its captures.
  for_each_block<L, kCount>(
      n,
      [&](std::size_t i) PYRINGAR_INLINE_LAMBDA {
        Vector sum[kCount];
        FoldOrder::template fold<L, Op>(sum, num_sources, divisor != 1,
                                        [&](int r, int u) PYRINGAR_INLINE_LAMBDA {
                                          return L::load(source(r) + i + u * L::kLanes);
                                        });
        typename L::Packed packed[kCount];
        for (int u = 0; u < kCount; ++u) packed[u] = L::pack(divided<L, Op>(sum[u], divisor));
        for (int r = 0; r < num_destinations; ++r) {
          for (int u = 0; u < kCount; ++u) {
            store_vector(packed[u], destination(r) + i + u * L::kLanes);
          }
        }
      },
      [&](std::size_t i, std::size_t count) {
        Vector sum[1];
        FoldOrder::template fold<L, Op>(
            sum, num_sources, divisor != 1,
            [&](int r, int) PYRINGAR_INLINE_LAMBDA { return load_some<L>(source(r) + i, count); });
        const Vector result = divided<L, Op>(sum[0], divisor);
        for (int r = 0; r < num_destinations; ++r) {
          store_some<L>(result, destination(r) + i, count);
        }
      });
}

template <typename L>
void widen_kernel(const void* own, void* partial_out, std::size_t n) {
  const auto* from = static_cast<const typename L::Element*>(own);
  auto* to = static_cast<typename L::Partial*>(partial_out);
  std::size_t i = 0;
  for (; i + L::kLanes <= n; i += L::kLanes) store_vector(L::load(from + i), to + i);
  if (i < n) {
    const typename L::Vector v = load_some<L>(from + i, n - i);
    std::memcpy(to + i, &v, (n - i) * sizeof *to);
  }
}

template <typename L, typename Op>
void accumulate_kernel(const void* partial_in, const void* own, void* partial_out, std::size_t n) {
  using Vector = typename L::Vector;
  const auto* partial = static_cast<const typename L::Partial*>(partial_in);
  const auto* element = static_cast<const typename L::Element*>(own);
  auto* to = static_cast<typename L::Partial*>(partial_out);
  std::size_t i = 0;
  for (; i + L::kLanes <= n; i += L::kLanes) {
    store_vector(combine<L, Op>(load_vector<typename L::Vector>(partial + i), L::load(element + i)),
                 to + i);
  }
  if (i < n) {
    Vector some{};
    std::memcpy(&some, partial + i, (n - i) * sizeof *to);
    some = combine<L, Op>(some, load_some<L>(element + i, n - i));
    std::memcpy(to + i, &some, (n - i) * sizeof *to);
  }
}

template <typename L, typename Op>
void finish_kernel(const void* partial_in, const void* own, void* const* destinations,
                   int num_destinations, std::size_t n, int divisor) {
  using Element = typename L::Element;
  const auto* partial = static_cast<const typename L::Partial*>(partial_in);
  const auto* element = static_cast<const Element*>(own);
  std::size_t i = 0;
  for (; i + L::kLanes <= n; i += L::kLanes) {
    const typename L::Vector sum =
        combine<L, Op>(load_vector<typename L::Vector>(partial + i), L::load(element + i));
    const typename L::Packed packed = L::pack(divided<L, Op>(sum, divisor));
    for (int r = 0; r < num_destinations; ++r) {
      store_vector(packed, static_cast<Element*>(destinations[r]) + i);
    }
  }
  if (i < n) {
    typename L::Vector sum{};
    std::memcpy(&sum, partial + i, (n - i) * sizeof *partial);
    sum = combine<L, Op>(sum, load_some<L>(element + i, n - i));
    sum = divided<L, Op>(sum, divisor);
    for (int r = 0; r < num_destinations; ++r) {
      store_some<L>(sum, static_cast<Element*>(destinations[r]) + i, n - i);
    }
  }
}

}  // namespace pyringar
