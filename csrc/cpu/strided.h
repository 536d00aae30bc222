// strided: tensors whose elements do not lie side by side, packed and unpacked, and compared.
//
// Units     shape and strides in elements; data borrowed.
// Contract  pack() and unpack() visit elements in the order of their index, so that tensors of
//           equal shape pack to equal positions; packed elements have their own sign. Gaps between
//           elements are never touched.
// Threads   pure functions of their arguments, any.
// Tests     tests/conformance/test_layouts.py
#pragma once

#include <cstddef>
#include <functional>

#include "core/collective.h"

namespace pyringar {

void pack(const StridedView& from, std::byte* to);
void unpack(const std::byte* from, const StridedView& to);

// visit(part) for parts of the view of at most so many elements, in the order of their index.
void for_each_part(const StridedView& view, std::size_t most_elems,
                   const std::function<void(const StridedView& part)>& visit);
std::size_t num_elems(const StridedView& view);

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
