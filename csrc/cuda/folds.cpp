// folds: fills tables of tensors and launches the fused kernels.
#include "cuda/folds.h"

#include <algorithm>

#include "cuda/kernels.h"
#include "cuda/runtime.h"

namespace pyringar::cuda {

namespace {

// Integer dtype of this element size: its sum over one source copies the bits.
DType copied_as(std::size_t item) {
  return item == 8 ? DType::kInt64 : item == 4 ? DType::kInt32 : DType::kUInt8;
}

}  // namespace

FusedLaunches::FusedLaunches(const TensorList& list, std::size_t num_devices) {
  launch_tables(list, num_devices, [&]<typename T>(DType dtype, const T* tables) {
    for (std::size_t d = 0; d < num_devices; ++d) {
      if (!has_elements(tables[d])) continue;
      launches_.push_back({kernel_function(dtype, list.fold, kFusedWith<T>), d, tables[d].num_tiles,
                           std::make_shared<T>(tables[d])});
    }
  });
}

void FusedLaunches::launch(std::span<const int> devices,
                           std::span<const cudaStream_t> streams) const {
  for (const FusedLaunch& one : launches_) {
    const OnDevice guard(devices[one.device]);
    void* arguments[] = {one.table.get()};
    check(cudaLaunchKernel(one.kernel, dim3(one.num_tiles), dim3(kThreads), arguments, 0,
                           streams[one.device]),
          "launch of fused", devices[one.device]);
  }
}

void Folds::add(DType dtype, std::span<const void* const> sources,
                std::initializer_list<void*> destinations, std::size_t numel) {
  if (numel == 0) return;
  items_.push_back({dtype, numel, pointers_.size()});
  for (const void* source : sources) pointers_.push_back(const_cast<void*>(source));
  pointers_.insert(pointers_.end(), destinations.begin(), destinations.end());
}

void Folds::add_copy(std::byte* to, const std::byte* from, std::size_t bytes, DType dtype) {
  const DType as = copied_as(item_bytes(dtype));
  const void* sources[] = {from};
  add(as, sources, {to}, bytes / item_bytes(as));
}

void Folds::launch(int device, cudaStream_t stream) const {
  std::vector<Buffers> tensors;
  for (const Item& item : items_) {
    void* const* pointers = pointers_.data() + item.pointers;
    tensors.push_back({pointers, pointers + num_sources_, num_sources_, num_destinations_,
                       item.numel, item.dtype});
  }
  FusedLaunches({tensors, fold_, "fold"}, 1).launch({&device, 1}, {&stream, 1});
}

}  // namespace pyringar::cuda
