// folds: see the header.
//
// Floor     cuda
// Tests     tests/cpp/cuda_processes

#include "cuda/folds.h"

#include <algorithm>
#include <memory>
#include <type_traits>

#include "core/error.h"
#include "cuda/kernels.h"
#include "cuda/runtime.h"
#include "cuda/table.h"

namespace pyringar::cuda {

namespace {

// Enough for every multiprocessor several times over; more blocks only wait in line.
constexpr std::uint32_t kMaxBlocks = 4096;

// Whose sum of one source is that source, bit by bit.
DType copied_as(std::size_t item) {
  return item == 8 ? DType::kInt64 : item == 4 ? DType::kInt32 : DType::kUInt8;
}

}  // namespace

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
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const auto count = static_cast<std::size_t>(std::count_if(
        items_.begin(), items_.end(), [&](const Item& item) { return item.dtype == dtype; }));
    if (count == 0) continue;
    const std::size_t pointers = count * static_cast<std::size_t>(num_sources_ + num_destinations_);
    if (count <= SmallTable::kMaxSegments && pointers <= SmallTable::kMaxPointers) {
      launch_tables<SmallTable>(dtype, device, stream);
    } else {
      launch_tables<LargeTable>(dtype, device, stream);
    }
  }
}

template <typename T>
void Folds::launch_tables(DType dtype, int device, cudaStream_t stream) const {
  const void* kernel = kernel_function(
      dtype, fold_.op,
      std::is_same_v<T, SmallTable> ? KernelKind::kFusedSmall : KernelKind::kFusedLarge);
  const OnDevice guard(device);
  auto next = items_.begin();
  while (true) {
    T table;
    TableBuilder<T> builder(table, item_bytes(dtype), num_sources_, num_destinations_,
                            fold_.divisor);
    for (; next != items_.end(); ++next) {
      if (next->dtype != dtype) continue;
      void* const* pointers = pointers_.data() + next->pointers;
      if (!builder.add(pointers, pointers + num_sources_, next->numel)) break;
    }
    if (table.num_segments == 0) {
      if (next == items_.end()) return;
      fail(ErrorKind::kUnsupported, num_sources_, " ranks are more than one launch can address (",
           T::kMaxPointers, " pointers)");
    }
    void* arguments[] = {&table};
    check(cudaLaunchKernel(kernel, dim3(std::min(kMaxBlocks, table.num_tiles)), dim3(kThreads),
                           arguments, 0, stream),
          "launch of fused", device);
  }
}

}  // namespace pyringar::cuda
