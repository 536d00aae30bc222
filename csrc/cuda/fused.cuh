// fused: read k inputs, add in registers, write k outputs. One pass, many tensors.
//
// Contract  fused_kernel adds in rank order, tree_kernel in the order of core/tree.h, for any grid.
//           One thread folds an element and reads it from all sources before it writes, because a
//           destination may be a source. A thread holds 16 bytes of each source, or single elements
//           if the tensors' alignments differ. More than 8 sources are read in groups.
// Threads   any grid of blocks of kThreads. Blocks do not wait for each other.
// Tests     tests/cpp/cuda/fused_kernel_test.cpp, tests/cuda, tests/build/test_cuda_kernels.py
#pragma once

#include "core/fold.h"
#include "core/tree.h"
#include "cuda/pack.cuh"
#include "cuda/table.h"

namespace pyringar::cuda {

template <typename Op, typename T>
PYRINGAR_DEVICE T finished(T sum, const Divisor& divisor) {
  if constexpr (std::is_same_v<Op, Mean>) return divided(sum, divisor);
  if constexpr (std::is_same_v<Op, Sum> && std::is_floating_point_v<T>) {
    return sum * static_cast<T>(divisor.reciprocal);
  }
  return sum;
}

// 16 bytes of one source, which a thread reduces one Pack at a time.
template <typename E>
struct WideUnit {
  using Element = typename E::Element;
  using Raw = Bytes16;
  using Value = Pack<E>;
  static constexpr int kMost = kTreeGroup;  // number of sources loaded at once
  static constexpr int kValues = kPackBytes / Value::kBytes;

  PYRINGAR_DEVICE Raw load(const Element* from) const { return load16(from); }
  PYRINGAR_DEVICE void store(const Raw& result, Element* to) const { store16(result, to); }
  static PYRINGAR_DEVICE Value widened(const Raw& raw, int i) {
    return Value::from_elements(raw, i);
  }
  template <typename Op>
  static PYRINGAR_DEVICE Value combined(Value a, const Value& b) {
    a.template combine<Op>(b);
    return a;
  }
  template <typename Op>
  static PYRINGAR_DEVICE void finish(Value sum, const Divisor& divisor, Raw& result, int i) {
#pragma unroll
    for (auto& lane : sum.lane) lane = finished<Op>(lane, divisor);
    sum.to_elements(result, i);
  }
};

// Single elements of one source at distances of kThreads, for tensors with different alignments.
template <typename E>
struct ElementsUnit {
  using Element = typename E::Element;
  using Value = typename E::Partial;
  static constexpr int kMost = 1;
  static constexpr int kValues = sizeof(Element) == 8 ? 2 : 4;
  struct Raw {
    Element element[kValues];
  };

  std::size_t left;  // number of elements from the thread's first element to the end

  PYRINGAR_DEVICE bool has(int i) const { return static_cast<std::size_t>(i) * kThreads < left; }
  PYRINGAR_DEVICE Raw load(const Element* from) const {
    Raw raw{};
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (has(i)) raw.element[i] = load_element(from + i * kThreads);
    }
    return raw;
  }
  PYRINGAR_DEVICE void store(const Raw& result, Element* to) const {
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      if (has(i)) to[i * kThreads] = result.element[i];
    }
  }
  static PYRINGAR_DEVICE Value widened(const Raw& raw, int i) { return E::widened(raw.element[i]); }
  template <typename Op>
  static PYRINGAR_DEVICE Value combined(Value a, Value b) {
    return Op::template apply<Value>(a, b);
  }
  template <typename Op>
  static PYRINGAR_DEVICE void finish(Value sum, const Divisor& divisor, Raw& result, int i) {
    result.element[i] = E::narrowed(finished<Op>(sum, divisor));
  }
};

template <typename E, typename Op, Order order, typename Unit>
class UnitFold {
 public:
  using Element = typename E::Element;
  using Value = typename Unit::Value;

  PYRINGAR_DEVICE UnitFold(const TableView& table, const TableEntry& entry, std::size_t at,
                           Unit unit)
      : table_(table), entry_(entry), at_(at), unit_(unit) {}

  PYRINGAR_DEVICE void run() const {
    typename Unit::Raw result;
    const auto take = [&](int i, const Value& sum) {
      Unit::template finish<Op>(sum, table_.divisor, result, i);
    };
    const int num = table_.num_sources;
    if (num <= Unit::kMost) {
      with_count<Unit::kMost>(num, [&]<int kNum>() { add_group<kNum>(0, take); });
    } else {
      Value sums[kValues];
      add_many(num, sums);
#pragma unroll
      for (int i = 0; i < kValues; ++i) take(i, sums[i]);
    }
    void* const* destinations = table_.pointers + entry_.destinations;
    for (int r = 0; r < table_.num_destinations; ++r) {
      unit_.store(result, static_cast<Element*>(destinations[r]) + at_);
    }
  }

 private:
  static constexpr int kValues = Unit::kValues;
  // Number of sources loaded at once while partial sums occupy registers.
  static constexpr int kGroup = sizeof(Element) == 8 ? 2 : 4;
  static constexpr int kSlots = 11;
  static_assert(LargeTable::kMaxPointers <= kGroup << kSlots);

  static PYRINGAR_DEVICE Value add(const Value& a, const Value& b) {
    return Unit::template combined<Op>(a, b);
  }

  // Load sources [lo, lo + kNum). Call take(i, sum) with the sum of each of the thread's values.
  template <int kNum, typename Take>
  PYRINGAR_DEVICE void add_group(int lo, const Take& take) const {
    typename Unit::Raw raw[kNum];
    load(raw, lo);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const auto leaf = [&](int r) { return Unit::widened(raw[r], i); };
      if constexpr (order == Order::kTree) {
        take(i, tree_of<kNum>(0, leaf, add));
      } else {
        Value sum = leaf(0);
#pragma unroll
        for (int r = 1; r < kNum; ++r) sum = add(sum, leaf(r));
        take(i, sum);
      }
    }
  }

  PYRINGAR_DEVICE void add_many(int num, Value (&sums)[kValues]) const {
    if constexpr (order == Order::kTree) {
      Value slots[kSlots][kValues];
      tree_of_any<kGroup>(num, [&](int lo, int group, int to, int end) {
        with_count<kGroup>(group, [&]<int kNum>() {
          add_group<kNum>(lo, [&](int i, Value sum) {
            for (int slot = end; slot > to; --slot) sum = add(slots[slot - 1][i], sum);
            slots[to][i] = sum;
          });
        });
      });
      for (int i = 0; i < kValues; ++i) sums[i] = slots[0][i];
    } else {
      // Only the first group may have fewer than kGroup sources, so that the loop has no remainder.
      int next = (num - 1) % kGroup + 1;
      with_count<kGroup>(next, [&]<int kNum>() {
        add_group<kNum>(0, [&](int i, const Value& sum) { sums[i] = sum; });
      });
      for (; next < num; next += kGroup) {
        typename Unit::Raw raw[kGroup];
        load(raw, next);
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
#pragma unroll
          for (int r = 0; r < kGroup; ++r) sums[i] = add(sums[i], Unit::widened(raw[r], i));
        }
      }
    }
  }

  template <int kNum>
  PYRINGAR_DEVICE void load(typename Unit::Raw (&raw)[kNum], int lo) const {
#pragma unroll
    for (int r = 0; r < kNum; ++r) raw[r] = unit_.load(source(lo + r));
  }

  PYRINGAR_DEVICE const Element* source(int r) const {
    return static_cast<const Element*>(table_.pointers[entry_.sources + r]) + at_;
  }

  const TableView& table_;
  const TableEntry& entry_;
  const std::size_t at_;
  const Unit unit_;
};

template <typename E, typename Op, Order order>
PYRINGAR_DEVICE void fold_elements(const TableView& table, const TableEntry& entry,
                                   std::size_t begin, std::size_t end) {
  using Unit = ElementsUnit<E>;
  for (std::size_t i = begin + thread_index(); i < end; i += Unit::kValues * kThreads) {
    UnitFold<E, Op, order, Unit>(table, entry, i, {end - i}).run();
  }
}

template <typename E, typename Op, Order order>
PYRINGAR_DEVICE void fold_tile(const TableView& table, const TableEntry& entry,
                               std::uint32_t tile) {
  constexpr std::size_t kItem = sizeof(typename E::Element);
  const std::size_t begin = entry.head + tile * tile_elems(kItem);
  if (entry.vector == 0) {
    const std::size_t end = begin + tile_elems(kItem);
    fold_elements<E, Op, order>(table, entry, begin, end < entry.numel ? end : entry.numel);
    return;
  }
  const Range vectors = vector_range(entry, kItem);
  if (tile == 0) {
    fold_elements<E, Op, order>(table, entry, 0, vectors.begin);
    fold_elements<E, Op, order>(table, entry, vectors.end, entry.numel);
  }
  const std::size_t at = begin + thread_index() * (kPackBytes / kItem);
  if (at < vectors.end) UnitFold<E, Op, order, WideUnit<E>>(table, entry, at, {}).run();
}

template <typename E, typename Op, Order order>
PYRINGAR_DEVICE void fold_tiles(const TableView& table) {
  for (std::uint32_t tile = block_index(); tile < table.num_tiles; tile += num_blocks()) {
    const TableEntry& entry = table.entries[find_entry(table, tile)];
    fold_tile<E, Op, order>(table, entry, tile - entry.first_tile);
  }
}

template <typename E, typename Op, typename T>
PYRINGAR_KERNEL(kThreads, fused_blocks(sizeof(typename E::Element)))
fused_kernel(PYRINGAR_KERNEL_ARG T arguments) {
  fold_tiles<E, Op, Order::kRank>(arguments.view());
}

template <typename E, typename Op, typename T>
PYRINGAR_KERNEL(kThreads, fused_blocks(sizeof(typename E::Element)))
tree_kernel(PYRINGAR_KERNEL_ARG T arguments) {
  fold_tiles<E, Op, Order::kTree>(arguments.view());
}

}  // namespace pyringar::cuda
