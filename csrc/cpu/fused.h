// fused: ranks that share a memory, reduced in one pass: read k, add in registers, write k.
//
// Units     elements; pointers borrowed for the call.
// Contract  Rank order: one thread folds each element. Tensors of one call touch disjoint memory.
// Threads   the caller's, and when there is enough to do torch's own (os/torch_team.h), or helpers
//           of the pool where torch computes meanwhile or has no threads that can be joined.
// Tests     tests/conformance/test_bits.py, tests/cpp/stress.cpp
#pragma once

#include <cstddef>
#include <span>

#include "core/collective.h"
#include "os/thread_pool.h"
#include "os/torch_team.h"

namespace pyringar {

inline constexpr std::size_t kMaxBlockBytes = 64 * 1024;

void run_fused(std::span<const Buffers> tensors, Fold fold, ThreadPool& pool, CallMode mode);

// Whether an asynchronous call runs at once: it is small, or medium while torch's threads idle.
bool is_best_done_at_once(std::span<const Buffers> tensors);

}  // namespace pyringar
