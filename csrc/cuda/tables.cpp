// tables: fused and direct: the tensors of a call as tables, and their launches.
//
// Floor     cuda
// Tests     tests/cpp/cuda_host/group_test.cpp, tests/test_cuda.py

#include "cuda/group.h"

#include <algorithm>
#include <type_traits>

#include "core/error.h"
#include "cuda/kernels.h"
#include "cuda/table.h"

namespace pyringar::cuda {

namespace {

// Enough for every multiprocessor several times over; more blocks only wait in line.
constexpr int kMaxBlocks = 4096;

}  // namespace

void Group::run_tables(const Collective& collective, std::span<const cudaStream_t> streams) {
  std::array<std::size_t, kNumDTypes> tensors_of{};
  for (const Buffers& tensor : collective.tensors) {
    ++tensors_of[static_cast<std::size_t>(tensor.dtype)];
  }
  // Of every tensor.
  const Buffers& first = collective.tensors.front();
  const auto pointers_each = static_cast<std::size_t>(first.num_sources + first.num_destinations);
  for (int i = 0; i < kNumDTypes; ++i) {
    const std::size_t count = tensors_of[static_cast<std::size_t>(i)];
    if (count == 0) continue;
    const bool is_small =
        count <= SmallTable::kMaxSegments && count * pointers_each <= SmallTable::kMaxPointers;
    if (is_small) {
      launch_tables<SmallTable>(collective, static_cast<DType>(i), streams);
    } else {
      launch_tables<LargeTable>(collective, static_cast<DType>(i), streams);
    }
  }
}

// Slices begin at multiples of this many elements, so that vectors stay aligned.
constexpr std::size_t kSliceElems = 64;

template <typename T>
void Group::launch_tables(const Collective& collective, DType dtype,
                          std::span<const cudaStream_t> streams) {
  const std::size_t item = item_bytes(dtype);
  const auto num_devices = static_cast<int>(devices_.size());
  const int num_sources = collective.tensors.front().num_sources;
  const int num_destinations = collective.tensors.front().num_destinations;
  std::size_t next = 0;
  while (next < collective.tensors.size()) {
    // The same tensors for every device, so that all have the same barriers to pass.
    std::vector<T> tables(devices_.size());
    std::vector<TableBuilder<T>> builders;
    for (T& table : tables) {
      builders.emplace_back(table, item, num_sources, num_destinations, collective.fold.divisor);
    }
    std::vector<void*> moved;
    bool is_full = false;
    for (; next < collective.tensors.size() && !is_full; ++next) {
      const Buffers& tensor = collective.tensors[next];
      if (tensor.dtype != dtype) continue;
      const std::size_t blocks = (tensor.numel + kSliceElems - 1) / kSliceElems;
      for (int d = 0; d < num_devices; ++d) {
        const Range slice = chunk_range(blocks, num_devices, d);
        const std::size_t begin = std::min(slice.begin * kSliceElems, tensor.numel);
        const std::size_t end = std::min(slice.end * kSliceElems, tensor.numel);
        const auto at_slice = [&](const void* memory) {
          return static_cast<std::byte*>(const_cast<void*>(memory)) + begin * item;
        };
        moved.clear();
        for (int i = 0; i < num_sources; ++i) moved.push_back(at_slice(tensor.sources[i]));
        if (!tensor.is_in_place()) {
          for (int i = 0; i < num_destinations; ++i) {
            moved.push_back(at_slice(tensor.destinations[i]));
          }
        }
        void* const* destinations = moved.data() + (tensor.is_in_place() ? 0 : num_sources);
        if (!builders[static_cast<std::size_t>(d)].add(moved.data(), destinations, end - begin)) {
          is_full = true;
          break;
        }
      }
      if (is_full) break;
    }
    if (tables[0].num_segments == 0) {
      if (!is_full) return;
      fail(ErrorKind::kUnsupported, collective.operation, ": ", num_sources,
           " ranks are more than one launch can address (", LargeTable::kMaxPointers, " pointers)");
    }
    int num_blocks = kMaxBlocks;
    std::uint32_t most_tiles = 0;
    for (const T& table : tables) most_tiles = std::max(most_tiles, table.num_tiles);
    const bool waits = num_devices > 1;
    const KernelKind kind = std::is_same_v<T, SmallTable>
                                ? (waits ? KernelKind::kDirectSmall : KernelKind::kFusedSmall)
                                : (waits ? KernelKind::kDirectLarge : KernelKind::kFusedLarge);
    const void* kernel = kernel_function(dtype, collective.fold.op, kind);
    if (waits) {
      const std::vector<int>& most = most_blocks(kernel, kThreads);
      num_blocks = std::min(kMaxWaitingBlocks, *std::min_element(most.begin(), most.end()));
    }
    num_blocks = std::max(1, std::min(num_blocks, static_cast<int>(most_tiles)));
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      launch_table(tables[d], dtype, collective.fold.op, d, num_blocks, streams[d]);
    }
  }
}

template <typename T>
void Group::launch_table(const T& table, DType dtype, ReduceOp op, std::size_t device,
                         int num_blocks, cudaStream_t stream) {
  const bool is_small = std::is_same_v<T, SmallTable>;
  const int index = per_device_[device].index;
  const OnDevice guard(index);
  void* argument = const_cast<T*>(&table);  // copied by the launch, which takes no const
  if (devices_.size() == 1) {
    const void* kernel =
        kernel_function(dtype, op, is_small ? KernelKind::kFusedSmall : KernelKind::kFusedLarge);
    void* arguments[] = {argument};
    check(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads),
                           arguments, 0, stream),
          "launch of fused", index);
    return;
  }
  const void* kernel =
      kernel_function(dtype, op, is_small ? KernelKind::kDirectSmall : KernelKind::kDirectLarge);
  BarrierPorts ports = per_device_[device].ports;
  Patience wait = patience(device);
  if (wait.withheld >= 0) {
    const int place = place_[static_cast<std::size_t>(wait.withheld)];
    wait.withheld = static_cast<std::int32_t>(index_of(place));
  }
  void* arguments[] = {argument, &ports, &wait};
  check(cudaLaunchCooperativeKernel(kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads),
                                    arguments, 0, stream),
        "launch of direct", index);
}

}  // namespace pyringar::cuda
