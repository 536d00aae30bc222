// recorders: engines that run csrc/core's templates and record what would happen to shared memory.
//
// Contract  A bug changes what is recorded, never the template. Every message's payload is new, so
//           that a stale or torn one shows.
// Memory    Laid out as the engines of processes lay it out:
//
//             staged      rank r's slot s holds k slices, one per rank that will reduce it; an
//                         exchange reads all of it. That engine reads a rank's own slice where it
//                         lies; here it goes through the slot, which is more.
//             record      what call s is lies in calls[s % 2] of each rank, written before the
//                         call's program begins
//             ring        a link's slot is one word
//
//           A slice is one word: its bytes are all written between the same two counters, so no
//           order can tear them that does not also let a reader find a whole slice too early.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/ring_program.h"
#include "core/staged_program.h"
#include "recording.h"

namespace pyringar::model {

enum class CallKind { kDirect, kExchange, kRing, kScatter, kGather };

struct Call {
  CallKind kind;
  std::size_t pieces;
  bool refused = false;  // agree() says no, on every rank; nothing of it is read
  bool is_staged() const { return kind < CallKind::kRing; }
};

struct Setup {
  int num_ranks = 2;
  std::uint32_t slots = kStagingSlots;
  bool swaps = true;                 // two ranks their slots; those on GPUs do not
  std::uint32_t ring_slots = 0;      // 0: as many as the template asks for
  std::uint32_t base = 0;            // of staged messages and of the ring's
  std::uint32_t reduced_behind = 0;  // how far `reduced` is behind base: messages exchanged since
  std::vector<Call> calls{};
  std::string bug{};  // by name, as tests/test_model.py lists them
};

// All calls on all ranks, finished.
Recording record(const Setup& setup);

}  // namespace pyringar::model
