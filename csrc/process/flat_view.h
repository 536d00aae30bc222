// flat_view: one rank's tensors viewed as a single buffer (no copy), cut into pieces that fit a
// slot.
//
// Units     bytes for the line and for pieces, elements for runs.
// Contract  Tensors of one dtype follow each other without gaps and make one run, so that a
//           thousand small ones are reduced as one; another dtype begins a run on a new cache line.
//           Pieces are cut at multiples of 64 bytes of the line, hence between elements. Equal
//           lists have equal lines: what lies at a position is the same element on all ranks.
// Threads   one at a time changes it, with view().
// Tests     tests/cpp/process_test.cpp
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/dtype.h"

namespace pyringar {

// Elements of one tensor, densely packed; memory borrowed.
struct TensorSpan {
  std::byte* data;
  std::size_t numel;
  DType dtype;
  std::size_t bytes() const { return numel * item_bytes(dtype); }
};

class FlatView {
 public:
  FlatView() = default;
  explicit FlatView(const std::vector<TensorSpan>& tensors) { view(tensors); }
  // Another list's, in the memory that this one has.
  void view(const std::vector<TensorSpan>& tensors);

  std::size_t bytes() const { return bytes_; }

  // visit(memory, offset in the line's part, bytes) for what of each tensor lies in [begin, end).
  template <typename Visit>
  void for_each_tensor(std::size_t begin, std::size_t end, Visit&& visit) const {
    for (std::size_t i = first_after(tensor_ends_, begin); i < tensors_.size(); ++i) {
      const std::size_t first = tensor_ends_[i] - tensors_[i].bytes();
      if (first >= end) return;
      const std::size_t from = std::max(begin, first);
      const std::size_t to = std::min(end, tensor_ends_[i]);
      if (from < to) visit(tensors_[i].data + (from - first), from - begin, to - from);
    }
  }

  // visit(dtype, offset, elements) for what of each run lies in [begin, end).
  template <typename Visit>
  void for_each_run(std::size_t begin, std::size_t end, Visit&& visit) const {
    for (std::size_t i = first_after(run_ends_, begin); i < runs_.size(); ++i) {
      if (runs_[i].begin >= end) return;
      const std::size_t from = std::max(begin, runs_[i].begin);
      const std::size_t to = std::min(end, run_ends_[i]);
      const std::size_t item = item_bytes(runs_[i].dtype);
      if (from < to) visit(runs_[i].dtype, from - begin, (to - from) / item);
    }
  }

 private:
  struct Run {
    DType dtype;
    std::size_t begin;
  };

  static std::size_t first_after(const std::vector<std::size_t>& ends, std::size_t position) {
    return static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), position) -
                                    ends.begin());
  }

  std::vector<TensorSpan> tensors_;  // without the empty ones
  std::vector<std::size_t> tensor_ends_;
  std::vector<Run> runs_;
  std::vector<std::size_t> run_ends_;
  std::size_t bytes_ = 0;
};

}  // namespace pyringar
