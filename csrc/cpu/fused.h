// fused: ranks that share a memory, reduced in one pass: read k, add in registers, write k.
//
// Units     elements; pointers borrowed for the call.
// Contract  Rank order: one thread folds each element. Tensors of one call touch disjoint memory.
// Threads   the caller's, and when there is enough to do torch's own (os/torch_team.h), or helpers
//           of the pool where torch computes meanwhile or has no threads that can be joined.
// Tests     tests/conformance/test_bits.py, tests/cpp/stress.cpp
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <string>

#include "core/collective.h"
#include "os/stillness.h"
#include "os/thread_pool.h"
#include "os/torch_team.h"

namespace pyringar {

// Bytes per rank that a thread takes at a time, at most.
inline constexpr std::size_t kMaxBlockBytes = 64 * 1024;

void run_fused(std::span<const Buffers> tensors, Fold fold, ThreadPool& pool, Beside beside);

// Whether an asynchronous call runs before it returns: the call is small, or it is of medium size
// and torch's threads are awake and idle.
bool is_best_done_at_once(std::span<const Buffers> tensors);

// On which threads a call that its caller waits for would run: for people.
std::string describe_workers(std::size_t traffic_bytes);

// The elements [range) of one tensor, on this thread.
void fuse_range(const Buffers& tensor, Fold fold, Range range);

// The same in blocks of kProgressBytes; calls progressed() after each.
template <typename Progressed>
void fuse_blocks(const Buffers& tensor, Fold fold, Range range, Progressed&& progressed) {
  const std::size_t block_elems = kProgressBytes / item_bytes(tensor.dtype);
  for (std::size_t begin = range.begin; begin < range.end; begin += block_elems) {
    fuse_range(tensor, fold, {begin, std::min(begin + block_elems, range.end)});
    progressed();
  }
}

}  // namespace pyringar
