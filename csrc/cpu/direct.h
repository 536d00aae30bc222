// direct: every rank reduces its own slice from all peers, in rank order, and writes it to all.
//
// Units     elements; pointers borrowed for the call.
// Contract  rank order. Between the two barriers only the owner touches a slice:
//             all inputs ready | barrier | read peers, write peers | barrier | results visible
// Threads   direct_rank() is called once per rank, all at once. False: a wait failed.
// Tests     tests/conformance/test_bits.py, tests/cpp/stress.cpp
#pragma once

#include <vector>

#include "cpu/fused.h"
#include "cpu/rank_team.h"

namespace pyringar {

// arrived[r] counts the barriers rank r has reached; only rank r writes it.
struct Barrier {
  explicit Barrier(int world_size) : arrived(static_cast<std::size_t>(world_size)) {}
  std::vector<Flag> arrived;
  std::uint32_t passed = 0;
};

bool direct_rank(int rank, std::span<const Buffers> tensors, Fold fold, Barrier& barrier,
                 std::uint32_t base, Watch& watch);

inline constexpr std::uint32_t kDirectBarriers = 2;

}  // namespace pyringar
