// fused: the reduction of ranks in one memory, in one pass over k tensors.
// Units     elements; pointers are borrowed for the call.
// Contract  One thread reduces each element, in rank order. Tensors of a call must not overlap.
// Threads   The caller's thread, and for larger calls torch's team (os/torch_team.h) or helpers.
// Tests     tests/conformance/test_bits.py, tests/cpp/pool_test.cpp
#pragma once

#include <cstddef>
#include <span>

#include "core/collective.h"
#include "os/thread_pool.h"
#include "os/torch_team.h"

namespace pyringar {

inline constexpr std::size_t kMaxBlockBytes = 64 * 1024;

void run_fused(std::span<const Buffers> tensors, Fold fold, ThreadPool& pool, CallMode mode);

// Return true if an asynchronous call should run in the caller's thread: it moves under 512 KiB, or
// under 8 MiB while torch's team is ready.
bool is_best_done_at_once(std::span<const Buffers> tensors);

}  // namespace pyringar
