// fused: read k inputs, add in registers in rank order, write k outputs; one pass, many tensors.
//
// Floor     cuda: device code.
// Contract  rank order, whatever the grid: every element is folded by one thread in the order of
//           its sources. Traffic is the minimum, (sources + destinations) * n. A destination may be
//           one of the sources: each element is read before it is written, by the same thread.
// Threads   any grid of kThreads-wide blocks; blocks do not wait for each other.
// Tests     tests/cpp/cuda/fused_test.cpp, tests/cuda
#pragma once

#include "cuda/pack.cuh"
#include "cuda/table.h"

namespace pyringar::cuda {

template <typename E, typename Op>
class Folder {
 public:
  using Element = typename E::Element;
  static constexpr std::size_t kItem = sizeof(Element);
  static constexpr int kUnroll = packs_per_thread(kItem);
  static constexpr std::size_t kPackElems = 16 / kItem;

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
    Pack<E> sum[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (is_mine(u))
        sum[u] = Pack<E>::from_elements(load16<kFused.evicts_first>(source(0) + at(u)));
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
      if (!is_mine(u)) continue;
      sum[u].template divide<Op>(table_.divisor);
      result[u] = sum[u].to_elements();
    }
    for (int r = 0; r < table_.num_destinations; ++r) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (is_mine(u)) store16(result[u], destination(r) + at(u));
      }
    }
  }

  PYRINGAR_DEVICE void fold_elements(std::size_t begin, std::size_t end) const {
    for (std::size_t i = begin + thread_index(); i < end; i += kThreads) {
      typename E::Partial sum = E::widened(load_element(source(0) + i));
      for (int r = 1; r < table_.num_sources; ++r) {
        sum = Op::template apply<typename E::Partial>(sum, E::widened(load_element(source(r) + i)));
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

template <typename E, typename Op, typename T>
PYRINGAR_KERNEL(kThreads, blocks_each(sizeof(typename E::Element)))
fused_kernel(PYRINGAR_KERNEL_ARG T arguments) {
  const TableView table = arguments.view();
  for (std::uint32_t tile = block_index(); tile < table.num_tiles; tile += num_blocks()) {
    const Segment& segment = table.segments[find_segment(table, tile)];
    Folder<E, Op>(table, segment).run_tile(tile - segment.first_tile);
  }
}

}  // namespace pyringar::cuda
