// ring: the ring program on one CPU thread per rank, with slots in shared memory.
// Units     elements; pointers are borrowed for the call.
// Contract  Each rank sends 2 (k-1)/k of the buffer in an all-reduce, half of that otherwise.
// Threads   Call ring_rank() once per rank, all at once, with equal arguments. It returns false if
//           a wait failed; Watch holds the reason.
// Tests     tests/conformance/test_bits.py, tests/cpp/ring_test.cpp (ThreadSanitizer, delays)
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <vector>

#include "core/collective.h"
#include "core/ring_program.h"
#include "cpu/rank_team.h"
#include "os/wait.h"

namespace pyringar {

// Bytes of all slots of a link. The data of one tick then stays in a core's L2 cache.
inline constexpr std::size_t kLinkBytes = 512 * 1024;

constexpr std::size_t ring_slot_bytes(int world_size) {
  return std::max<std::size_t>(64, kLinkBytes / ring_num_slots(world_size));
}

struct Link {
  Flag flag;   // number of messages published; set by the writer
  Flag taken;  // number of messages consumed; set by the reader
};

// The links of a ring. links[r] leads from rank r to rank r + 1; each carried `messages` messages.
struct RingLinks {
  explicit RingLinks(int world_size)
      : links(static_cast<std::size_t>(world_size)),
        num_slots(ring_num_slots(world_size)),
        slot_bytes(ring_slot_bytes(world_size)),
        slots(std::make_unique_for_overwrite<std::byte[]>(links.size() * num_slots * slot_bytes)) {}

  std::vector<Link> links;
  const std::uint32_t num_slots;  // per link
  const std::size_t slot_bytes;
  const std::unique_ptr<std::byte[]> slots;
  std::uint32_t messages = 0;

  int world_size() const { return static_cast<int>(links.size()); }
  std::byte* slot(int from_rank, std::uint32_t message) const {
    const std::size_t index = static_cast<std::size_t>(from_rank) * num_slots + message % num_slots;
    return slots.get() + index * slot_bytes;
  }
};

// Return the program of `rank` for one tensor, if all links have carried `base` messages.
inline RingProgram ring_program(int rank, const Buffers& tensor, const RingLinks& ring,
                                std::uint32_t base) {
  const std::size_t piece_elems = ring.slot_bytes / partial_bytes(tensor.dtype);
  return {rank, ring.world_size(), tensor.numel, piece_elems, tensor.phases, base};
}

bool ring_rank(int rank, const Buffers& tensor, Fold fold, RingLinks& ring, std::uint32_t base,
               Watch& watch);

}  // namespace pyringar
