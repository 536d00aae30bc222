// args: what hosts hand to kernels: plain structures, the same on both sides.
//
// Units     bytes, elements, nanoseconds. Pointers are of the device that runs the kernel, or of
//           memory that it can reach.
// Contract  all are passed by value, and fit the 32,764 bytes that a launch can carry.
// Tests     tests/cpp/cuda/
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/fold.h"
#include "core/ring_program.h"

namespace pyringar::cuda {

// A flag has a cache line of its own, kFlagStride words from one to the next in an array.
inline constexpr int kFlagStride = 32;

enum class Awaited : std::int32_t { kMessage, kSlot };

// Written by the device, read by the host, in memory of the host that both can see.
struct Failure {
  std::uint32_t is_set;  // last, after all the others
  Awaited what;
  std::int32_t rank;  // who waited
  std::int32_t peer;  // for whom
  std::int32_t step;  // of the ring
  std::uint32_t seen;
  std::uint32_t wanted;
};

struct WaitLimits {
  std::uint64_t timeout_ns;  // without progress of who is waited for
  std::uint32_t* gave_up;    // one word on this device: 0, or 1 once a block has failed
  Failure* failure;
  std::int32_t withheld;  // rank that does not take part; -1 for none
};

inline constexpr int kRingThreads = 512;
inline constexpr int kRingBlocksEach = 2;  // of a multiprocessor: one moves data while one waits
inline constexpr int kMaxLocalRanks = 64;

inline constexpr std::size_t kFlagBytes = kFlagStride * sizeof(std::uint32_t);

// The links of one rank. Flags are kFlagStride words apart per channel; slots [channel][slot].
struct RingPorts {
  const std::byte* in_slots;
  const std::uint32_t* in_flag;
  std::uint32_t* in_taken;  // prev's out_taken
  std::byte* out_slots;     // next's in_slots
  std::uint32_t* out_flag;  // next's in_flag
  const std::uint32_t* out_taken;
  std::uint32_t* base;  // messages carried so far
  // Where the neighbours are among this device's ranks; -1: on another device.
  std::int32_t prev_local;
  std::int32_t next_local;
};

struct RingArgs {
  const RingPorts* ports;  // of this device's ranks, in device memory
  std::uint64_t numel;
  std::uint32_t piece_elems;
  std::uint32_t num_slots;
  std::uint32_t slot_bytes;
  std::int32_t world_size;
  std::int32_t num_channels;
  Divisor divisor;
  RingPhases phases;
  WaitLimits patience;
  std::int32_t rank[kMaxLocalRanks];
  const void* input[kMaxLocalRanks];
  void* output[kMaxLocalRanks];
};

// Elements that a piece has less than fit a slot, where it begins at an index below this.
inline constexpr std::size_t kSlotSpareElems = 16;

}  // namespace pyringar::cuda
