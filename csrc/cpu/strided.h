// strided: tensors whose elements do not lie side by side, packed and unpacked, and compared.
//
// Units     shape and strides in elements; data borrowed.
// Contract  pack() and unpack() visit elements in the order of their index, so that tensors of
//           equal shape pack to equal positions, with their own sign. Gaps are never touched.
// Tests     tests/conformance/test_layouts.py
#pragma once

#include <cstddef>
#include <functional>

#include "core/collective.h"

namespace pyringar {

// progressed: called about every 2^17 elements.
using Progressed = std::function<void()>;
void pack(const StridedView& from, std::byte* to, const Progressed& progressed = [] {});
void unpack(std::byte* from, const StridedView& to, const Progressed& progressed = [] {});

// Bytes [first, last) that hold the view's elements and the gaps between them.
struct ByteSpan {
  const std::byte* first;
  const std::byte* last;
};
ByteSpan span_of(const StridedView& view);

// Exact, gaps considered: do two elements, of one view or of two, share a byte? A few comparisons
// for slices of dense tensors and for two slices cut alike; else a bit for every byte of the span.
bool overlaps_itself(const StridedView& view);
bool overlap(const StridedView& a, const StridedView& b);

}  // namespace pyringar
