// call: one collective of one rank among processes, and the engines that run it.
//
// Units     elements for spans, bytes for pieces.
// Contract  rank order for every size and cut. No tensor is written before all ranks' calls agree.
// Threads   a group runs one call at a time.
// Source    core/staged_program.h
// Tests     tests/conformance/test_bits.py, tests/cpp/process_test.cpp
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include "core/collective.h"
#include "cpu/strided.h"
#include "process/peer_watch.h"
#include "process/segment.h"

namespace pyringar {

enum class ProcessAlgorithm : std::uint8_t { kExchange, kDirect };
inline constexpr int kNumProcessAlgorithms = 2;
const char* process_algorithm_name(ProcessAlgorithm algorithm);

CallRecord record_of(const Collective& call);

// A moment at which a test may stop a rank, to kill it there.
enum class Phase : std::uint8_t { kIdle, kAnnounce, kReduce, kGather };
inline constexpr int kNumPhases = 4;
const char* phase_name(Phase phase);

struct PhaseDelay {
  Phase phase = Phase::kIdle;
  std::chrono::nanoseconds delay{};
};

// One rank's tensors as a line of bytes (no copy), cut into pieces that fit a slot. Each begins at
// a multiple of kAlignment: cuts there fall between elements, and loads of 16 bytes stay aligned.
// Equal lists have equal lines: a position is the same element on all ranks.
class FlatView {
 public:
  static constexpr std::size_t kAlignment = 16;

  // The destinations of another call, in the memory that this view has.
  void view(const Collective& call) {
    tensors_.clear();
    bytes_ = 0;
    for (std::size_t i = 0; i < call.tensors.size(); ++i) {
      const TensorSpan tensor = call.local_destination(i);
      if (tensor.numel == 0) continue;
      const std::size_t begin = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
      bytes_ = begin + tensor.bytes();
      tensors_.push_back({tensor, begin, bytes_});
    }
  }

  std::size_t bytes() const { return bytes_; }

  // The part of a tensor that lies in a range.
  struct Slice {
    DType dtype;
    std::byte* data;
    std::size_t offset;  // from the range's begin
    std::size_t bytes;
  };
  template <typename Visit>
  void for_each_slice(Range range, Visit&& visit) const {
    const auto first = std::upper_bound(
        tensors_.begin(), tensors_.end(), range.begin,
        [](std::size_t position, const Entry& entry) { return position < entry.end; });
    for (auto entry = first; entry != tensors_.end() && entry->begin < range.end; ++entry) {
      const std::size_t from = std::max(range.begin, entry->begin);
      const std::size_t to = std::min(range.end, entry->end);
      visit(Slice{entry->tensor.dtype, entry->tensor.data + (from - entry->begin),
                  from - range.begin, to - from});
    }
  }

 private:
  struct Entry {
    TensorSpan tensor;
    std::size_t begin;
    std::size_t end;
  };

  std::vector<Entry> tensors_;  // without the empty ones
  std::size_t bytes_ = 0;
};

// What a rank keeps from call to call.
struct ProcessRank {
  const Segment& segment;
  const int rank;
  PeerWatch& watch;
  std::uint64_t sequence = 0;     // calls so far
  std::uint64_t call_digest = 0;  // of the call's record
  std::uint32_t messages = 0;     // announced so far
  void (*on_announce)() = [] {};  // see ProcessGroupOptions
  PhaseDelay delay{};             // for tests
  bool layouts_differ = false;    // why the last call was refused: see in_index_order()
  // Of the call that runs; kept for their memory.
  FlatView flat{};
  std::vector<const void*> sources{};

  // What the next call's messages follow. Ranks whose tensors lie otherwise may have meant to send
  // another number of pieces: no more than kMostRefused were announced when they noticed.
  static constexpr std::uint32_t kMostRefused = 2;
  bool count_messages(const StagedProgram& program, bool is_done);
  void sleep_in(Phase phase);
};

// Up to this, every rank reduces everything: one wait instead of two. Two ranks always do.
inline constexpr std::size_t kExchangeBytes = 32 * 1024;

// What a call is cut to: of two ranks, and of more where it does not fit one slot, since ranks that
// share cores pay dearly for each wait. Small enough that what is under way stays in a core's L2.
inline constexpr std::size_t kPieceBytesOfTwo = 64 * 1024;
inline constexpr std::size_t kPieceBytes = 128 * 1024;

// From this size on a call's tensors do not stay in a core's L2 until they are copied in: two ranks
// begin to read a piece while they combine the one before.
inline constexpr std::size_t kReadsAheadBytes = 2 * 1024 * 1024;

ProcessAlgorithm algorithm_of(const Collective& call, const Segment& segment);

struct ProcessPlan {
  ProcessAlgorithm algorithm;
  std::size_t num_pieces;  // each of them takes the algorithm's rounds
};
ProcessPlan plan_all_reduce(std::size_t bytes, const Segment& segment);

// What every call begins with: its record, for the others to compare.
void begin_call(const Collective& call, ProcessRank& self, bool is_background);

// Packs tensors with gaps, announces, compares, moves the data, unpacks. False: a wait
// failed or calls differ, and the watch says why; or self.layouts_differ is set, on all ranks, and
// nothing was written.
bool run_process_call(const Collective& call, ProcessRank& self, bool is_background);

// The same call for ranks whose tensors lie otherwise: in the order of their index, through slots.
Collective in_index_order(const Collective& call);

}  // namespace pyringar
