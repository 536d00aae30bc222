// args: plain structures that the host passes to kernels by value.
//
// Units     bytes, elements, nanoseconds. Kernels can dereference every pointer.
// Contract  Each structure fits the 32,764 bytes of kernel parameters.
// Tests     tests/cpp/cuda/
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/fold.h"
#include "core/ring_program.h"

namespace pyringar::cuda {

// Each flag has a separate cache line. kFlagStride is the distance between flags, in words.
inline constexpr int kFlagStride = 32;

enum class Awaited : std::int32_t { kMessage, kSlot };

// First failed wait of a device. Kernels write it in pinned host memory, and the host reads it.
struct Failure {
  std::uint32_t is_set;  // written last, after all other members
  Awaited what;
  std::int32_t rank;  // the rank that waited
  std::int32_t peer;  // the rank that it waited for
  std::int32_t step;  // ring step
  std::uint32_t seen;
  std::uint32_t wanted;
};

struct WaitLimits {
  std::uint64_t timeout_ns;  // a wait fails if its counter is unchanged for this time
  std::uint32_t* gave_up;    // device word: 1 once a block has failed, else 0
  Failure* failure;
  std::int32_t withheld;  // for tests: this rank's blocks exit at once; -1: all ranks run
};

inline constexpr int kRingThreads = 512;
// Blocks per multiprocessor: one moves data while the other waits.
inline constexpr int kRingBlocksEach = 2;
inline constexpr int kMaxLocalRanks = 64;

inline constexpr std::size_t kFlagBytes = kFlagStride * sizeof(std::uint32_t);

// One rank's slots and flags. Slots are indexed [channel][slot]. Each channel has one flag.
struct RingPorts {
  const std::byte* in_slots;
  const std::uint32_t* in_flag;
  std::uint32_t* in_taken;  // the previous rank's out_taken
  std::byte* out_slots;     // the next rank's in_slots
  std::uint32_t* out_flag;  // the next rank's in_flag
  const std::uint32_t* out_taken;
  std::uint32_t* base;  // counter of messages that each link has carried
  // Index of the neighbor among this device's ranks. -1: the neighbor is on another device.
  std::int32_t prev_local;
  std::int32_t next_local;
};

struct RingArgs {
  const RingPorts* ports;  // ports of each rank of this device, in device memory
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

// A piece is kSlotSpareElems shorter than its slot, since it may begin at any lower slot index.
inline constexpr std::size_t kSlotSpareElems = 16;

}  // namespace pyringar::cuda
