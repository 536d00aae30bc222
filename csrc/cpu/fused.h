// fused: ranks that share a memory, reduced in one pass: read k, add in registers, write k.
//
// Floor     cpu
// Units     elements; pointers borrowed for the call.
// Contract  rank order, whatever the number of threads: each element is folded by one thread in
//           the order of its sources. Traffic is the minimum, (sources + destinations) * n.
//           Reductions of one call touch disjoint memory.
// Threads   the caller's, plus helpers of the pool when there is enough to do.
// Tests     tests/test_all_reduce.py, tests/cpp/stress.cpp
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "core/dtype.h"
#include "os/stillness.h"
#include "os/thread_pool.h"

namespace pyringar {

// One tensor over all ranks: its inputs in rank order, and where the result goes. A broadcast has
// one source, a reduce-scatter one destination.
struct Reduction {
  const void* const* sources;
  void* const* destinations;
  int num_sources;
  int num_destinations;
  std::size_t numel;
  DType dtype;

  std::size_t traffic_bytes() const {
    return numel * item_bytes(dtype) * static_cast<std::size_t>(num_sources + num_destinations);
  }
};

void run_fused(std::span<const Reduction> reductions, ReduceOp op, int divisor, ThreadPool& pool);

// The elements [range) of one reduction, on this thread.
void fuse_range(const Reduction& reduction, ReduceOp op, int divisor, Range range);

// The same, and calls progressed() at least every kProgressBytes.
template <typename Progressed>
void fuse_blocks(const Reduction& reduction, ReduceOp op, int divisor, Range range,
                 Progressed&& progressed) {
  const std::size_t block_elems = kProgressBytes / item_bytes(reduction.dtype);
  for (std::size_t begin = range.begin; begin < range.end; begin += block_elems) {
    fuse_range(reduction, op, divisor, {begin, std::min(begin + block_elems, range.end)});
    progressed();
  }
}

}  // namespace pyringar
