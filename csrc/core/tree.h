// tree: the order of addition that core/fold.h calls "tree".
// Contract  T(lo, lo + 1) = x[lo], and T(lo, hi) = T(lo, mid) + T(mid, hi) otherwise, where
//           mid - lo is the largest power of two below hi - lo. Six ranks: ((0 1) (2 3)) (4 5). If
//           each of k ranks adds m numbers, m a power of two, the bits equal those of km ranks.
// Source    pairwise summation (Higham 1993), cut at powers of two; the error grows with log2(k).
// Tests     the static_asserts below, tests/conformance/test_bits.py
#pragma once

#include <cstdint>

#include "core/schedule.h"

namespace pyringar {

PYRINGAR_HD constexpr int tree_split(int lo, int hi) {
  int half = 1;
  while (2 * half < hi - lo) half *= 2;
  return lo + half;
}

static_assert(tree_split(0, 2) == 1 && tree_split(0, 8) == 4 && tree_split(0, 7) == 4);
static_assert(tree_split(8, 13) == 12 && tree_split(4, 7) == 6, "T(0, 7) = T(0, 4) + T(4, 7)");

// Return T(lo, lo + kNum). leaf(r) returns x[r]; add(a, b) returns a + b.
PYRINGAR_ANY_SIDE
template <int kNum, typename Leaf, typename Add>
PYRINGAR_HD_INLINE constexpr auto tree_of(int lo, const Leaf& leaf, const Add& add) {
  if constexpr (kNum == 1) {
    return leaf(lo);
  } else {
    constexpr int kHalf = tree_split(0, kNum);
    const auto left = tree_of<kHalf>(lo, leaf, add);
    return add(left, tree_of<kNum - kHalf>(lo + kHalf, leaf, add));
  }
}

inline constexpr int kTreeGroup = 8;  // number of leaves that unrolled code adds

// Call visit<num>(), with num from 1 to kMost as a template argument.
PYRINGAR_ANY_SIDE
template <int kMost, typename Visit>
PYRINGAR_HD_INLINE constexpr auto with_count(int num, const Visit& visit) {
  if constexpr (kMost > 1) {
    if (num < kMost) return with_count<kMost - 1>(num, visit);
  }
  return visit.template operator()<kMost>();
}

PYRINGAR_ANY_SIDE
template <typename Leaf, typename Add>
PYRINGAR_HD_INLINE constexpr auto tree_of_few(int lo, int num, const Leaf& leaf, const Add& add) {
  return with_count<kTreeGroup>(num, [&]<int kNum>() { return tree_of<kNum>(lo, leaf, add); });
}

// Compute T(0, num) for any num with an array s of partial sums, which works as a binary counter:
// two sums of equal size are added into one. put(lo, n, to, end) must set
// s[to] = s[to] + (... + (s[end - 1] + T(lo, lo + n))), with n <= kGroup, a power of two. The last
// call sets s[0] to the result. m entries of s suffice for kGroup << m leaves.
PYRINGAR_ANY_SIDE
template <int kGroup, typename Put>
PYRINGAR_HD_INLINE constexpr void tree_of_any(int num, const Put& put) {
  int lo = 0;
  int end = 0;
  for (; num - lo > kGroup; lo += kGroup) {
    int to = end;
    for (int group = lo / kGroup; group % 2 == 1; group /= 2) --to;
    put(lo, kGroup, to, end);
    end = to + 1;
  }
  put(lo, num - lo, 0, end);
}

namespace tree_test {

// An addition for the test: it is neither commutative nor associative.
constexpr std::uint64_t sum_of(std::uint64_t a, std::uint64_t b) {
  return (a * 0x9E3779B97F4A7C15u ^ b) * 3 + (a >> 31);
}
constexpr std::uint64_t x(int r) { return static_cast<std::uint64_t>(r) + 1; }
constexpr std::uint64_t equation(int lo, int hi) {
  if (hi - lo == 1) return x(lo);
  const int mid = tree_split(lo, hi);
  return sum_of(equation(lo, mid), equation(mid, hi));
}
template <int kGroup>
constexpr bool holds_for(int num) {
  std::uint64_t slots[5] = {};
  tree_of_any<kGroup>(num, [&](int lo, int n, int to, int end) {
    std::uint64_t sum = tree_of_few(lo, n, x, sum_of);
    while (end > to) sum = sum_of(slots[--end], sum);
    slots[to] = sum;
  });
  return slots[0] == equation(0, num);
}
constexpr bool holds_up_to(int most) {
  for (int num = 1; num <= most; ++num) {
    if (!holds_for<kTreeGroup>(num) || !holds_for<kTreeGroup / 2>(num)) return false;
  }
  return true;
}
static_assert(holds_up_to(kTreeGroup << 4));
static_assert(sum_of(equation(0, 4), equation(4, 7)) == equation(0, 7));

}  // namespace tree_test

}  // namespace pyringar
