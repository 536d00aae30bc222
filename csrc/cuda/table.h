// table: the tensors of one launch, cut into tiles. Kernels get the table by value: a launch
// allocates no memory, and a CUDA graph can capture the launch.
//
// Units     elements for ranges; `item` is the size of an element in bytes.
// Contract  An entry is one tensor: head, vectors, tail. Vectors are 16-byte aligned for all
//           pointers of the entry. Its first tile also covers head and tail. An entry whose
//           pointers differ modulo 16 has no vectors.
// Tests     tests/cpp/cuda/fused_kernel_test.cpp, tests/cpp/cuda_processes
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/fold.h"

namespace pyringar::cuda {

#if defined(PYRINGAR_EMULATED_THREADS)
inline constexpr int kThreads = PYRINGAR_EMULATED_THREADS;  // host threads per block, in tests
#else
inline constexpr int kThreads = 256;
#endif

// Resident blocks of a fused kernel per multiprocessor. With one more block, kernels spill
// registers or load the last sources late. 4, 5 and 6 blocks are equally fast.
PYRINGAR_HD constexpr int fused_blocks(std::size_t item) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  if (item == 4) return 4;  // int32 spills registers with 5 blocks
#endif
  return item == 4 ? 5 : item == 1 ? 3 : 4;
}

// A tile is 4 KiB of every source: 16 bytes per thread.
PYRINGAR_HD constexpr std::size_t tile_elems(std::size_t item) {
  return static_cast<std::size_t>(kThreads) * (16 / item);
}

struct TableEntry {
  std::uint64_t numel;
  std::uint32_t first_tile;  // index of the entry's first tile in the launch
  std::uint16_t sources;     // index of the first source pointer in the table
  std::uint16_t destinations;
  std::uint16_t head;    // elements before the first vector
  std::uint16_t vector;  // 1: all pointers are 16-byte aligned after `head` elements
  std::uint32_t unused;
};
static_assert(sizeof(TableEntry) == 24);

PYRINGAR_HD constexpr std::uint32_t num_tiles(const TableEntry& entry, std::size_t item) {
  const std::size_t body = entry.numel - entry.head;
  const std::size_t tiles = (body + tile_elems(item) - 1) / tile_elems(item);
  return static_cast<std::uint32_t>(tiles > 0 ? tiles : 1);
}

// Elements [begin, end) of the vectors. The head precedes them, the tail follows.
PYRINGAR_HD constexpr Range vector_range(const TableEntry& entry, std::size_t item) {
  const std::size_t head = entry.head;
  if (entry.vector == 0) return {head, head};
  return {head, head + (entry.numel - head) / (16 / item) * (16 / item)};
}

struct TableView {
  void* const* pointers;
  const TableEntry* entries;
  std::uint32_t num_entries;
  std::uint32_t num_tiles;
  int num_sources;       // sources of each entry
  int num_destinations;  // destinations of each entry
  Divisor divisor;
};

// Find the entry of a tile: the last entry whose first_tile is not greater.
PYRINGAR_HD constexpr std::uint32_t find_entry(const TableView& table, std::uint32_t tile) {
  std::uint32_t low = 0;
  std::uint32_t high = table.num_entries;
  while (high - low > 1) {
    const std::uint32_t middle = (low + high) / 2;
    if (table.entries[middle].first_tile <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

template <int kPointers, int kEntries>
struct Table {
  static constexpr int kMaxPointers = kPointers;
  static constexpr int kMaxEntries = kEntries;
  std::uint32_t num_entries = 0;
  std::uint32_t num_tiles = 0;
  std::uint32_t num_pointers = 0;
  std::int32_t num_sources = 0;
  std::int32_t num_destinations = 0;
  std::uint32_t unused = 0;
  Divisor divisor;
  void* pointers[kPointers];
  TableEntry entries[kEntries];

  PYRINGAR_HD TableView view() const {
    return {pointers, entries, num_entries, num_tiles, num_sources, num_destinations, divisor};
  }
};

// Each launch copies its parameters, and most calls fit the small table. The large table holds
// ResNet-18 for 8 ranks in place. Longer lists take several launches.
using SmallTable = Table<96, 24>;
using LargeTable = Table<640, 120>;
static_assert(sizeof(SmallTable) < 1400 && sizeof(LargeTable) < 8192);

// Number of table pointers for a tensor. In place, sources and destinations are stored once.
inline std::uint32_t pointers_wanted(const void* const* sources, void* const* destinations,
                                     int num_sources, int num_destinations) {
  const bool in_place = sources == destinations && num_sources == num_destinations;
  return static_cast<std::uint32_t>(num_sources + (in_place ? 0 : num_destinations));
}

// Fills a table with tensors. add() returns false if the table is full.
template <typename T>
class TableBuilder {
 public:
  TableBuilder(T& table, std::size_t item, int num_sources, int num_destinations, int divisor)
      : table_(table), item_(item) {
    table_.num_sources = num_sources;
    table_.num_destinations = num_destinations;
    table_.divisor = Divisor::of(divisor);
  }

  bool add(const void* const* sources, void* const* destinations, std::size_t numel,
           std::size_t offset_bytes = 0) {
    const auto num_sources = static_cast<std::uint32_t>(table_.num_sources);
    const auto num_destinations = static_cast<std::uint32_t>(table_.num_destinations);
    const std::uint32_t wanted =
        pointers_wanted(sources, destinations, table_.num_sources, table_.num_destinations);
    if (table_.num_entries == T::kMaxEntries ||
        table_.num_pointers + wanted > static_cast<std::uint32_t>(T::kMaxPointers)) {
      return false;
    }
    TableEntry& entry = table_.entries[table_.num_entries++];
    entry = {numel, table_.num_tiles, push(sources, num_sources, offset_bytes), 0, 0, 0, 0};
    entry.destinations =
        wanted == num_sources ? entry.sources : push(destinations, num_destinations, offset_bytes);
    align(entry, wanted);
    table_.num_tiles += num_tiles(entry, item_);
    return true;
  }

 private:
  std::uint16_t push(const void* const* pointers, std::uint32_t count, std::size_t offset_bytes) {
    const auto first = static_cast<std::uint16_t>(table_.num_pointers);
    for (std::uint32_t i = 0; i < count; ++i) {
      auto* memory = static_cast<std::byte*>(const_cast<void*>(pointers[i]));
      table_.pointers[table_.num_pointers++] = memory + offset_bytes;
    }
    return first;
  }

  void align(TableEntry& entry, std::uint32_t count) const {
    const auto misalignment = [&](std::uint32_t i) {
      return reinterpret_cast<std::uintptr_t>(table_.pointers[entry.sources + i]) % 16;
    };
    for (std::uint32_t i = 1; i < count; ++i) {
      if (misalignment(i) != misalignment(0)) return;
    }
    if (misalignment(0) % item_ != 0) return;
    const std::size_t head = (16 - misalignment(0)) % 16 / item_;
    entry.vector = 1;
    entry.head = static_cast<std::uint16_t>(head < entry.numel ? head : entry.numel);
  }

  T& table_;
  const std::size_t item_;
};

}  // namespace pyringar::cuda
