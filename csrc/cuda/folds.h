// folds: launches of the fused kernels, over whole tensors or pieces of memory: sums and copies.
//
// Units     elements for folds, bytes for copies. Pointers are of memory that the device reaches.
// Contract  As core/fold.h says; a destination may be one of its sources. Everything that was added
//           runs in as few launches as it fits, in no order among itself.
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

// The launches of one list of tensors, of each device's slice; for as long as the tensors stay.
class FusedLaunches {
 public:
  FusedLaunches(const TensorList& list, std::size_t num_devices);

  void launch(std::span<const int> devices, std::span<const cudaStream_t> streams) const;

 private:
  struct FusedLaunch {
    const void* kernel;
    std::size_t device;  // its position
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
  // dtype: of what lies there; its bits are kept, also those of a NaN.
  void add_copy(std::byte* to, const std::byte* from, std::size_t bytes, DType dtype);
  void launch(int device, cudaStream_t stream) const;

 private:
  struct Item {
    DType dtype;
    std::size_t numel;
    std::size_t pointers;  // index of the first
  };

  const Fold fold_;
  const int num_sources_;
  const int num_destinations_;
  std::vector<Item> items_;
  std::vector<void*> pointers_;
};

}  // namespace pyringar::cuda
