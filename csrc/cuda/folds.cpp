// folds: see the header.
//
// Tests     tests/cpp/cuda_processes

#include "cuda/folds.h"

#include <algorithm>
#include <type_traits>

#include "cuda/kernels.h"
#include "cuda/runtime.h"

namespace pyringar::cuda {

namespace {

// Enough for every multiprocessor several times over; more blocks only wait in line.
constexpr std::uint32_t kMaxBlocks = 4096;

// Whose sum of one source is that source, bit by bit.
DType copied_as(std::size_t item) {
  return item == 8 ? DType::kInt64 : item == 4 ? DType::kInt32 : DType::kUInt8;
}

}  // namespace

void launch_fused(const TensorList& list, int device, cudaStream_t stream) {
  const OnDevice guard(device);
  launch_tables(list, 1, [&]<typename T>(DType dtype, T* table) {
    const KernelKind kind =
        std::is_same_v<T, SmallTable> ? KernelKind::kFusedSmall : KernelKind::kFusedLarge;
    void* arguments[] = {table};
    check(cudaLaunchKernel(kernel_function(dtype, list.fold.op, kind),
                           dim3(std::min(kMaxBlocks, table->num_tiles)), dim3(kThreads), arguments,
                           0, stream),
          "launch of fused", device);
  });
}

void Folds::add(DType dtype, std::span<const std::byte* const> sources,
                std::initializer_list<std::byte*> destinations, std::size_t numel) {
  if (numel == 0) return;
  items_.push_back({dtype, numel, pointers_.size()});
  for (const std::byte* source : sources) pointers_.push_back(const_cast<std::byte*>(source));
  pointers_.insert(pointers_.end(), destinations.begin(), destinations.end());
}

void Folds::add_copy(std::byte* to, const std::byte* from, std::size_t bytes, DType dtype) {
  const DType as = copied_as(item_bytes(dtype));
  const std::byte* sources[] = {from};
  add(as, sources, {to}, bytes / item_bytes(as));
}

void Folds::launch(int device, cudaStream_t stream) const {
  std::vector<Buffers> tensors;
  for (const Item& item : items_) {
    void* const* pointers = pointers_.data() + item.pointers;
    tensors.push_back({pointers, pointers + num_sources_, num_sources_, num_destinations_,
                       item.numel, item.dtype});
  }
  launch_fused({tensors, fold_, "fold"}, device, stream);
}

}  // namespace pyringar::cuda
