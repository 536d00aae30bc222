// strided: packs and unpacks non-contiguous tensors, and finds overlaps.
// Units     shape and strides in elements; data is borrowed.
// Contract  pack() and unpack() visit elements in index order, and apply the view's sign, so
//           tensors of equal shape pack to equal positions. Gaps are never touched.
// Tests     tests/conformance/test_layouts.py
#pragma once

#include <cstddef>
#include <functional>

#include "core/collective.h"

namespace pyringar {

// Callback of pack() and unpack(), called about every 2^17 elements.
using Progressed = std::function<void()>;
void pack(const StridedView& from, std::byte* to, const Progressed& progressed = [] {});
void unpack(std::byte* from, const StridedView& to, const Progressed& progressed = [] {});

// The bytes [first, last) from the first to the last element of a view, including gaps.
struct ByteSpan {
  const std::byte* first;
  const std::byte* last;
};
ByteSpan span_of(const StridedView& view);

// Return true if two elements, of one view or of two, share a byte. Cost: a few comparisons for
// slices of dense tensors, else a bitmap with one bit per byte of the span.
bool overlaps_itself(const StridedView& view);
bool overlap(const StridedView& a, const StridedView& b);

}  // namespace pyringar
