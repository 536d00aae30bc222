// fused: ranks that share a memory, reduced in one pass: read k, add in registers, write k.
//
// Units     elements; pointers borrowed for the call.
// Contract  rank order, whatever the number of threads: each element is folded by one thread in
//           the order of its sources. Traffic is the minimum, (sources + destinations) * n.
//           Tensors of one call touch disjoint memory.
// Threads   the caller's, plus helpers of the pool when there is enough to do.
// Tests     tests/test_all_reduce.py, tests/cpp/stress.cpp
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "core/collective.h"
#include "os/stillness.h"
#include "os/thread_pool.h"

namespace pyringar {

// Bytes per rank that a thread takes at a time, at most.
inline constexpr std::size_t kMaxBlockBytes = 64 * 1024;

void run_fused(std::span<const Buffers> tensors, Fold fold, ThreadPool& pool);

// The elements [range) of one tensor, on this thread.
void fuse_range(const Buffers& tensor, Fold fold, Range range);

// The same, and calls progressed() at least every kProgressBytes.
template <typename Progressed>
void fuse_blocks(const Buffers& tensor, Fold fold, Range range, Progressed&& progressed) {
  const std::size_t block_elems = kProgressBytes / item_bytes(tensor.dtype);
  for (std::size_t begin = range.begin; begin < range.end; begin += block_elems) {
    fuse_range(tensor, fold, {begin, std::min(begin + block_elems, range.end)});
    progressed();
  }
}

}  // namespace pyringar
