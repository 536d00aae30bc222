// tables: cuts a call's tensors into launches, with a table of cuda/table.h per device.
//
// Contract  One dtype per launch, and as few launches as the tables allow. All tensors have equally
//           many sources, and equally many destinations. Each device's table holds its slice of the
//           same tensors.
// Tests     tests/cpp/cuda_host/device_group_test.cpp, tests/cpp/cuda_processes
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <vector>

#include "core/collective.h"
#include "core/error.h"
#include "core/schedule.h"
#include "cuda/table.h"

namespace pyringar::cuda {

struct TensorList {
  std::span<const Buffers> tensors;
  Fold fold;
  const char* operation;  // name in error messages
};

// Slices begin at multiples of this many elements, so that vectors stay aligned.
inline constexpr std::size_t kSliceElems = 64;

inline Range slice_of(std::size_t numel, int num_devices, int d) {
  const Range blocks = chunk_range((numel + kSliceElems - 1) / kSliceElems, num_devices, d);
  return {std::min(blocks.begin * kSliceElems, numel), std::min(blocks.end * kSliceElems, numel)};
}

// Add each device's slice of the tensor. False: all tables are full, and nothing was added.
template <typename T>
bool add_slices(std::vector<TableBuilder<T>>& builders, const Buffers& tensor) {
  const auto num_devices = static_cast<int>(builders.size());
  for (int d = 0; d < num_devices; ++d) {
    const Range slice = slice_of(tensor.numel, num_devices, d);
    const std::size_t offset_bytes = slice.begin * item_bytes(tensor.dtype);
    if (!builders[static_cast<std::size_t>(d)].add(tensor.sources, tensor.destinations,
                                                   slice.size(), offset_bytes)) {
      return false;
    }
  }
  return true;
}

// False if a device has only empty slices, since all tensors are too short.
template <typename T>
bool has_elements(const T& table) {
  return std::any_of(table.entries, table.entries + table.num_entries,
                     [](const TableEntry& entry) { return entry.numel > 0; });
}

template <typename T, typename Launch>
void launch_dtype(const TensorList& list, DType dtype, std::size_t num_devices, Launch&& launch) {
  const Buffers& first = list.tensors.front();
  auto next = list.tensors.begin();
  while (true) {
    const auto tables = std::make_unique_for_overwrite<T[]>(num_devices);
    std::vector<TableBuilder<T>> builders;
    for (std::size_t d = 0; d < num_devices; ++d) {
      builders.emplace_back(tables[d], item_bytes(dtype), first.num_sources, first.num_destinations,
                            list.fold.divisor);
    }
    for (; next != list.tensors.end(); ++next) {
      if (next->dtype == dtype && !add_slices(builders, *next)) break;
    }
    if (tables[0].num_entries == 0) {
      if (next == list.tensors.end()) return;
      fail(ErrorKind::kUnsupported, list.operation, ": ", first.num_sources,
           " ranks are more than one launch can address (", T::kMaxPointers, " pointers)");
    }
    launch(dtype, tables.get());
    if (next == list.tensors.end()) return;
  }
}

// Table entries and pointers that the tensors of one dtype need.
struct TableDemand {
  std::size_t entries = 0;
  std::size_t pointers = 0;

  template <typename T>
  bool fits() const {
    return entries <= T::kMaxEntries && pointers <= T::kMaxPointers;
  }
};

// Call launch(dtype, tables) with a table per device until all tensors are launched.
template <typename Launch>
void launch_tables(const TensorList& list, std::size_t num_devices, Launch&& launch) {
  std::array<TableDemand, kNumDTypes> demands{};
  for (const Buffers& tensor : list.tensors) {
    TableDemand& demand = demands[static_cast<std::size_t>(tensor.dtype)];
    demand.entries += 1;
    demand.pointers += pointers_wanted(tensor.sources, tensor.destinations, tensor.num_sources,
                                       tensor.num_destinations);
  }
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const TableDemand& demand = demands[static_cast<std::size_t>(i)];
    if (demand.entries == 0) continue;
    if (demand.fits<SmallTable>()) {
      launch_dtype<SmallTable>(list, dtype, num_devices, launch);
    } else {
      launch_dtype<LargeTable>(list, dtype, num_devices, launch);
    }
  }
}

}  // namespace pyringar::cuda
