// folds: launches of the fused kernels, for sums and for copies.
//
// Units     elements for sums, bytes for copies. The device can access all pointers.
// Contract  Results as in core/fold.h. A destination may be one of its sources. One launch takes as
//           many items as fit, in no particular order.
// Threads   one object belongs to one thread.
// Tests     tests/cpp/cuda_processes
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <vector>

#include "core/collective.h"
#include "cuda/tables.h"

namespace pyringar::cuda {

// Prepared launches for one list of tensors, one slice per device. The caller keeps the tensors.
class FusedLaunches {
 public:
  FusedLaunches(const TensorList& list, std::size_t num_devices);

  void launch(std::span<const int> devices, std::span<const cudaStream_t> streams) const;

 private:
  struct FusedLaunch {
    const void* kernel;
    std::size_t device;  // position in Devices
    std::uint32_t num_tiles;
    std::shared_ptr<void> table;
  };

  std::vector<FusedLaunch> launches_;
};

class Folds {
 public:
  Folds(Fold fold, int num_sources, int num_destinations)
      : fold_(fold), num_sources_(num_sources), num_destinations_(num_destinations) {}
  static Folds copies() { return {Fold{}, 1, 1}; }

  void add(DType dtype, std::span<const void* const> sources,
           std::initializer_list<void*> destinations, std::size_t numel);
  // Add a copy of `bytes` bytes of elements of this dtype. NaN payloads are kept.
  void add_copy(std::byte* to, const std::byte* from, std::size_t bytes, DType dtype);
  void launch(int device, cudaStream_t stream) const;

 private:
  struct Item {
    DType dtype;
    std::size_t numel;
    std::size_t pointers;  // index of the first pointer
  };

  const Fold fold_;
  const int num_sources_;
  const int num_destinations_;
  std::vector<Item> items_;
  std::vector<void*> pointers_;
};

}  // namespace pyringar::cuda
