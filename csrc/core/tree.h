// tree: the order of addition that core/fold.h calls "tree".
//
// Contract  T(lo, lo + 1) = x[lo], and else T(lo, hi) = T(lo, mid) + T(mid, hi), where mid - lo is
//           the largest power of two below hi - lo. Of six: ((0 1) (2 3)) (4 5). So k ranks that
//           add m numbers each, m a power of two, have the bits of km ranks.
// Source    pairwise summation (Higham 1993), cut at powers of two; the error grows with log2(k).
// Tests     the static_asserts below, tests/conformance/test_bits.py
#pragma once

#include "core/schedule.h"

namespace pyringar {

PYRINGAR_HD constexpr int tree_split(int lo, int hi) {
  int half = 1;
  while (2 * half < hi - lo) half *= 2;
  return lo + half;
}

static_assert(tree_split(0, 2) == 1 && tree_split(0, 8) == 4 && tree_split(0, 7) == 4);
static_assert(tree_split(8, 13) == 12 && tree_split(4, 7) == 6, "T(0, 7) = T(0, 4) + T(4, 7)");

// T(lo, lo + kNum): leaf(r) gives x[r], add(a, b) their sum.
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

inline constexpr int kTreeGroup = 8;  // leaves that are added without a loop

// Calls visit<num>(), num from 1 to kMost.
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

// T(0, num), for any num, by calls of put(lo, n, to, end) that make slot s[to] of
// s[to] + (... + (s[end - 1] + T(lo, lo + n))), n at most kGroup, a power of two; the last call
// makes s[0]. Sums of whole groups wait in slots, the larger ones first, until one of their size
// stands beside them: a binary counter. m slots are enough for kGroup << m leaves.
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

}  // namespace pyringar
