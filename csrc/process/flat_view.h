// flat_view: one rank's tensors viewed as a single buffer (no copy), cut into pieces that fit a
// slot.
//
// Units     bytes.
// Contract  Each tensor begins at a multiple of kAlignment of the line, so that cuts at multiples
// of
//           it fall between elements and loads of 16 bytes stay aligned. Equal lists have equal
//           lines: what lies at a position is the same element on all ranks.
// Threads   one at a time changes it, with view().
// Tests     tests/cpp/process_test.cpp
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/collective.h"

namespace pyringar {

class FlatView {
 public:
  static constexpr std::size_t kAlignment = 16;

  // The destinations of another call, in the memory that this view has.
  void view(const Collective& call) {
    tensors_.clear();
    bytes_ = 0;
    for (std::size_t i = 0; i < call.tensors.size(); ++i) {
      const TensorSpan tensor = call.local_destination(i);
      if (tensor.numel == 0) continue;
      const std::size_t begin = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
      bytes_ = begin + tensor.bytes();
      tensors_.push_back({tensor, begin, bytes_});
    }
  }

  std::size_t bytes() const { return bytes_; }

  // visit(dtype, memory, offset in [begin, end), bytes) for what of each tensor lies there.
  template <typename Visit>
  void for_each(std::size_t begin, std::size_t end, Visit&& visit) const {
    const auto first = std::upper_bound(
        tensors_.begin(), tensors_.end(), begin,
        [](std::size_t position, const Placed& placed) { return position < placed.end; });
    for (auto placed = first; placed != tensors_.end() && placed->begin < end; ++placed) {
      const std::size_t from = std::max(begin, placed->begin);
      const std::size_t to = std::min(end, placed->end);
      visit(placed->tensor.dtype, placed->tensor.data + (from - placed->begin), from - begin,
            to - from);
    }
  }

 private:
  struct Placed {
    TensorSpan tensor;
    std::size_t begin;
    std::size_t end;
  };

  std::vector<Placed> tensors_;  // without the empty ones
  std::size_t bytes_ = 0;
};

}  // namespace pyringar
