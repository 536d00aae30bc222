// process_call: one collective of one rank among processes.
// Units     elements for spans, bytes for pieces.
// Contract  Rank order for each size and cut. No tensor is written before all ranks' calls agree.
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

CallRecord record_of(const Collective& call, const Segment& segment);

// The phases of a call in which a test may delay or kill a rank.
enum class Phase : std::uint8_t { kIdle, kAnnounce, kReduce, kGather };
inline constexpr int kNumPhases = 4;
const char* phase_name(Phase phase);

struct PhaseDelay {
  Phase phase = Phase::kIdle;
  std::chrono::nanoseconds delay{};
};

// One rank's tensors as one range of bytes, without a copy. Each tensor begins at a multiple of
// kAlignment, so that cuts fall between elements. A position is the same element on all ranks.
class FlatView {
 public:
  static constexpr std::size_t kAlignment = 16;

  // View the destinations of a call. Reuses the memory of `tensors_`.
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

  // The intersection of a tensor with a range.
  struct Slice {
    DType dtype;
    std::byte* data;
    std::size_t offset;  // bytes from the begin of the range
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

  std::vector<Entry> tensors_;  // all tensors with elements
  std::size_t bytes_ = 0;
};

// The state that a rank keeps between calls.
struct ProcessRank {
  const Segment& segment;
  const int rank;
  PeerWatch& watch;
  std::uint64_t sequence = 0;     // number of calls so far
  std::uint64_t call_digest = 0;  // digest of the CallRecord
  std::uint32_t messages = 0;     // number of messages announced so far
  void (*on_announce)() = [] {};  // as in ProcessGroupOptions
  PhaseDelay delay{};             // set by tests
  bool layouts_differ = false;    // agree() found other strides: see in_index_order()
  // Scratch memory of the running call, which later calls reuse.
  FlatView flat{};
  std::vector<const void*> sources{};

  // Advance `messages`. If layouts differ, ranks may disagree on the number of pieces; each has
  // announced at most kMaxRefused of them, so all ranks count that many.
  static constexpr std::uint32_t kMaxRefused = 2;
  bool count_messages(const StagedProgram& program, bool is_done);
  void sleep_in(Phase phase);
};

// Up to this size, and always with two ranks, each rank reduces all data: one wait, not two.
inline constexpr std::size_t kExchangeBytes = 32 * 1024;

// Piece sizes for two ranks, and for more ranks if a call exceeds one slot. Large pieces save
// waits, which are slow if ranks share cores; the data of two pieces must stay in a core's L2.
inline constexpr std::size_t kPieceBytesOfTwo = 64 * 1024;
inline constexpr std::size_t kPieceBytes = 128 * 1024;

// From this size on, tensors do not fit a core's L2: two ranks prefetch the next piece while they
// combine the current piece.
inline constexpr std::size_t kReadsAheadBytes = 2 * 1024 * 1024;

ProcessAlgorithm algorithm_of(const Collective& call, const Segment& segment);

struct ProcessPlan {
  ProcessAlgorithm algorithm;
  std::size_t num_pieces;  // number of pieces; each runs all rounds of the algorithm
};
ProcessPlan plan_all_reduce(std::size_t bytes, const Segment& segment);

void begin_call(const Collective& call, ProcessRank& self, bool is_background);

// Pack, compare the calls, move the data, unpack. Return false if a wait failed or calls differ;
// the watch holds the reason. Also return false, on all ranks, if self.layouts_differ is set: no
// tensor has changed then.
bool run_process_call(const Collective& call, ProcessRank& self, bool is_background);

// Return the call with tensors in index order, for ranks whose memory layouts differ.
Collective in_index_order(const Collective& call);

}  // namespace pyringar
