// fused: read k inputs, add in registers, write k outputs; one pass, many tensors.
//
// Floor     cuda: device code.
// Contract  fused_kernel adds in rank order, tree_kernel as core/tree.h says, whatever the grid:
//           every element is folded by one thread. Traffic is the minimum, (sources + destinations)
//           * n. A destination may be one of the sources: each element is read before it is
//           written, by the same thread.
// Threads   any grid of kThreads-wide blocks; blocks do not wait for each other.
// Tests     tests/cpp/cuda/fused_test.cpp, tests/ptx, tests/cuda
#pragma once

#include "core/fold.h"
#include "core/tree.h"
#include "cuda/pack.cuh"
#include "cuda/table.h"

namespace pyringar::cuda {

template <typename E, typename Op, Order order>
class Folder {
 public:
  using Element = typename E::Element;
  static constexpr std::size_t kItem = sizeof(Element);
  static constexpr int kUnroll = packs_per_thread(kItem);
  static constexpr std::size_t kPackElems = 16 / kItem;
  static constexpr int kSlots = 9;
  static_assert(LargeTable::kMaxPointers <= kTreeGroup << kSlots);

  PYRINGAR_DEVICE Folder(const TableView& table, const Segment& segment)
      : table_(table),
        segment_(segment),
        sources_(table.pointers + segment.sources),
        destinations_(table.pointers + segment.destinations) {}

  PYRINGAR_DEVICE void run_tile(std::uint32_t tile) const {
    const Range vectors = vector_range(segment_, kItem);
    const std::size_t begin = segment_.head + tile * tile_elems(kItem);
    if (segment_.vector == 0) {
      const std::size_t end = begin + tile_elems(kItem);
      fold_elements(begin, end < segment_.numel ? end : segment_.numel);
      return;
    }
    if (begin + tile_elems(kItem) <= vectors.end) {
      fold_packs<true>(begin, vectors.end);
    } else if (begin < vectors.end) {
      fold_packs<false>(begin, vectors.end);
    }
    if (tile == 0) {
      fold_elements(0, vectors.begin);
      fold_elements(vectors.end, segment_.numel);
    }
  }

 private:
  PYRINGAR_DEVICE const Element* source(int r) const {
    return static_cast<const Element*>(sources_[r]);
  }
  PYRINGAR_DEVICE Element* destination(int r) const {
    return static_cast<Element*>(destinations_[r]);
  }

  // kFull: every thread has all its packs, and loads need no condition.
  template <bool kFull>
  PYRINGAR_DEVICE void fold_packs(std::size_t begin, std::size_t end) const {
    const auto at = [&](int u) {
      return begin + (static_cast<std::size_t>(u) * kThreads + thread_index()) * kPackElems;
    };
    const auto is_mine = [&](int u) { return kFull || at(u) < end; };
    if constexpr (order == Order::kTree) {
      for (int u = 0; u < kUnroll; ++u) {
        if (!is_mine(u)) continue;
        const Bytes16 result = finished(tree<Pack<E>>([&](int r) { return load(r, at(u)); }));
        for (int r = 0; r < table_.num_destinations; ++r) store16(result, destination(r) + at(u));
      }
    } else {
      add_packs(at, is_mine);
    }
  }

  PYRINGAR_DEVICE Pack<E> load(int r, std::size_t at) const {
    return Pack<E>::from_elements(load16<kFused.evicts_first>(source(r) + at));
  }

  PYRINGAR_DEVICE Bytes16 finished(Pack<E> sum) const {
    sum.template divide<Op>(table_.divisor);
    return sum.to_elements();
  }

  template <typename At, typename IsMine>
  PYRINGAR_DEVICE void add_packs(const At& at, const IsMine& is_mine) const {
    Pack<E> sum[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (is_mine(u)) sum[u] = load(0, at(u));
    }
#pragma unroll 2
    for (int r = 1; r < table_.num_sources; ++r) {
      Bytes16 bytes[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (is_mine(u)) bytes[u] = load16<kFused.evicts_first>(source(r) + at(u));
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (is_mine(u)) sum[u].template combine<Op>(Pack<E>::from_elements(bytes[u]));
      }
    }
    Bytes16 result[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (is_mine(u)) result[u] = finished(sum[u]);
    }
    for (int r = 0; r < table_.num_destinations; ++r) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (is_mine(u)) store16(result[u], destination(r) + at(u));
      }
    }
  }

  // leaf(r): the pack, or the partial, of source r.
  template <typename Value, typename Leaf>
  PYRINGAR_DEVICE Value tree(const Leaf& leaf) const {
    const auto add = [](Value a, const Value& b) {
      if constexpr (std::is_same_v<Value, Pack<E>>) {
        a.template combine<Op>(b);
        return a;
      } else {
        return Op::template apply<Value>(a, b);
      }
    };
    if (table_.num_sources <= kTreeGroup) return tree_of_few(0, table_.num_sources, leaf, add);
    Value slots[kSlots];
    tree_of_any(table_.num_sources, [&](int lo, int num, int to, int end) {
      Value sum = tree_of_few(lo, num, leaf, add);
      while (end > to) sum = add(slots[--end], sum);
      slots[to] = sum;
    });
    return slots[0];
  }

  PYRINGAR_DEVICE void fold_elements(std::size_t begin, std::size_t end) const {
    for (std::size_t i = begin + thread_index(); i < end; i += kThreads) {
      const auto partial = [&](int r) { return E::widened(load_element(source(r) + i)); };
      typename E::Partial sum;
      if constexpr (order == Order::kTree) {
        sum = tree<typename E::Partial>(partial);
      } else {
        sum = partial(0);
        for (int r = 1; r < table_.num_sources; ++r) {
          sum = Op::template apply<typename E::Partial>(sum, partial(r));
        }
      }
      const Element result = E::narrowed(divided<Op>(sum, table_.divisor));
      for (int r = 0; r < table_.num_destinations; ++r) destination(r)[i] = result;
    }
  }

  const TableView& table_;
  const Segment& segment_;
  void* const* const sources_;
  void* const* const destinations_;
};

template <typename E, typename Op, Order order>
PYRINGAR_DEVICE void fold_tiles(const TableView& table) {
  for (std::uint32_t tile = block_index(); tile < table.num_tiles; tile += num_blocks()) {
    const Segment& segment = table.segments[find_segment(table, tile)];
    Folder<E, Op, order>(table, segment).run_tile(tile - segment.first_tile);
  }
}

template <typename E, typename Op, typename T>
PYRINGAR_KERNEL(kThreads, blocks_each(sizeof(typename E::Element)))
fused_kernel(PYRINGAR_KERNEL_ARG T arguments) {
  fold_tiles<E, Op, Order::kRank>(arguments.view());
}

// A thread has eight packs at once, of which more blocks would spill some.
template <typename E, typename Op, typename T>
PYRINGAR_KERNEL(kThreads, 2)
tree_kernel(PYRINGAR_KERNEL_ARG T arguments) {
  fold_tiles<E, Op, Order::kTree>(arguments.view());
}

}  // namespace pyringar::cuda
