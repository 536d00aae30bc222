// flat_view: where each tensor begins.
//
// Tests     tests/cpp/process_test.cpp

#include "process/flat_view.h"

namespace pyringar {

namespace {

constexpr std::size_t kCacheLine = 64;  // a multiple of every element's size

}  // namespace

void FlatView::view(const std::vector<TensorSpan>& tensors) {
  tensors_.clear();
  tensor_ends_.clear();
  runs_.clear();
  run_ends_.clear();
  bytes_ = 0;
  for (const TensorSpan& tensor : tensors) {
    if (tensor.numel == 0) continue;
    if (runs_.empty() || runs_.back().dtype != tensor.dtype) {
      bytes_ = (bytes_ + kCacheLine - 1) / kCacheLine * kCacheLine;
      runs_.push_back({tensor.dtype, bytes_});
      run_ends_.push_back(bytes_);
    }
    bytes_ += tensor.bytes();
    tensors_.push_back(tensor);
    tensor_ends_.push_back(bytes_);
    run_ends_.back() = bytes_;
  }
}

}  // namespace pyringar
