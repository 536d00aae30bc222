// segment: the layout of the memory that the processes of one group share.
// Contract  One writer per word: rank r writes line r and its slots, which two ranks swap as
//           core/staged_program.h says. The first rank that fails writes `failure`. lay_out()
//           writes `global_rank`, and any rank may set `is_named`.
//
//             header    version, token, failure
//             lines     one per rank: counters, the calls it makes, its process
//             devices   one per rank: counters that its GPU writes, on separate pages that CUDA can
//                       register; other ranks raise the counters of a lost rank
//             heads     one per staging slot: message number, digest, or a small message
//             staging   kStagingSlots per rank
// Threads   Counters and states are atomic. They publish the other members of a line.
// Tests     tests/conformance/test_bits.py, tests/cpp/process_test.cpp
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/collective.h"
#include "core/error.h"
#include "core/staged_program.h"
#include "os/process.h"
#include "os/thread.h"
#include "os/wait.h"

namespace pyringar {

// The call that a rank makes. Other ranks compare it with their own call.
struct alignas(64) CallRecord {
  std::uint64_t sequence = 0;  // number of the call on this rank, from 1; 0: no call yet
  std::uint64_t numel = 0;     // number of elements in all tensors
  std::uint64_t shapes = 0;    // digest of sizes and dtypes of all tensors
  std::uint64_t strides = 0;   // digest of strides that are not in index order; 0: there are none
  std::uint32_t num_tensors = 0;
  std::int32_t root = 0;  // global rank of the source of a broadcast; else 0
  CallKind kind = CallKind::kBarrier;
  DType dtype = DType::kFloat32;  // dtype of the first tensor
  ReduceOp op = ReduceOp::kSum;
  std::uint16_t divisor = 1;
  Order order = Order::kRank;
  std::array<char, 80> what{};  // text of the user's call, if this call replaces it

  bool operator==(const CallRecord&) const = default;
  // Return true if all fields except strides are equal.
  bool agrees(CallRecord other) const {
    other.strides = strides;
    return *this == other;
  }
  bool has_same_layout(const CallRecord& other) const { return strides == other.strides; }
  std::uint64_t digest() const;  // digest of all fields, including strides
  std::string text() const;
};
static_assert(sizeof(CallRecord) == 128, "two cache lines");

enum class RankState : std::uint32_t { kAbsent, kJoined, kLeft };

// The shared state of one rank.
struct alignas(64) RankLine {
  Flag announced;                   // number of the last message that the rank copied into its slot
  Flag reduced;                     // number of the last message whose slice the rank reduced
  std::array<CallRecord, 2> calls;  // call s in calls[s % 2]: a rank is at most one call ahead
  alignas(64) std::atomic<RankState> state{RankState::kAbsent};
  std::atomic<std::int32_t> core{-1};      // core of the rank at its last begin_call() or sleep
  std::atomic<std::int64_t> heard_ns{0};   // time of the last call or nap, monotonic clock; 0: none
  std::atomic<std::uint32_t> progress{0};  // grows during long work between messages
  CoreSet cores;                           // affinity mask of the rank
  ProcessId process;
  int global_rank = 0;                // number of the rank in messages
  std::atomic<bool> is_named{false};  // whether death_notice.h has named the rank
  std::array<char, 64> host{};
};

// The cache line of a message that other ranks poll. It saves reads of three lines (counter,
// record, slot), each of which takes 0.1 us. Written before `announced`; reused with its slot.
struct alignas(64) MessageHead {
  static constexpr std::size_t kPayloadBytes = 48;
  std::atomic<std::uint32_t> number{0};  // number of the message; written last
  std::uint64_t call_digest = 0;
  std::array<std::byte, kPayloadBytes> payload{};  // replaces the slot if the message fits
};
static_assert(sizeof(MessageHead) == 64, "one cache line");

// Progress of a rank's GPU (cuda_process/device_watch.h). The GPU writes one word per cache line.
struct DeviceLine {
  struct alignas(64) Word {
    std::atomic<std::uint32_t> value{0};
  };
  Word announced;
  Word reduced;
  Word finished;
  Word probe;  // written before the first message, to test that GPU writes arrive
  alignas(64) std::atomic<std::uint64_t> released{0};  // nonzero: a host thread raised the words
};
static_assert(sizeof(DeviceLine) == 5 * 64 && sizeof(DeviceLine::Word) == 64);

// Return how many messages a is ahead of b, in the first counter that differs.
template <typename Line>
std::int32_t lead_of(const Line& a, const Line& b) {
  const auto ahead = [](const auto& x, const auto& y) {
    return static_cast<std::int32_t>(x.value.load(std::memory_order_acquire) -
                                     y.value.load(std::memory_order_acquire));
  };
  const std::int32_t announced = ahead(a.announced, b.announced);
  return announced != 0 ? announced : ahead(a.reduced, b.reduced);
}

// The first failure of any rank, which all ranks report.
struct SharedFailure {
  enum State : std::uint32_t { kNone, kWriting, kThere };
  std::atomic<std::uint32_t> state{kNone};
  ErrorKind kind = ErrorKind::kState;
  std::array<char, 504> text{};
};

// Size of a staging slot. A rank's tensor, its slot and the other ranks' slots fit a core's L2.
inline constexpr std::size_t kSlotBytes = 256 * 1024;

inline constexpr std::size_t kTokenBytes = 32;
using SegmentToken = std::array<unsigned char, kTokenBytes>;

struct SegmentHeader {
  std::uint32_t version;
  SegmentToken token;
  SharedFailure failure;
};

class Segment {
 public:
  static std::size_t bytes_for(int world_size);
  // One process calls lay_out(), the others attach(), which throws if token or version differ.
  // global_ranks: numbers of the ranks in messages; empty: their ranks in the group.
  static Segment lay_out(std::byte* memory, int world_size, const SegmentToken& token,
                         const std::vector<int>& global_ranks = {});
  static Segment attach(std::byte* memory, int world_size, const SegmentToken& token);

  int world_size() const { return world_size_; }

  RankLine& line(int rank) const { return lines_[rank]; }
  DeviceLine& device(int rank) const { return devices_[rank]; }
  std::size_t devices_bytes() const;  // size of all device lines, in whole pages
  SharedFailure& failure() const { return header_->failure; }
  MessageHead& head(int rank, std::uint32_t message) const {
    return heads_[slot_index(rank, message)];
  }
  std::byte* slot(int rank, std::uint32_t message) const {
    return staging_ + slot_index(rank, message) * kSlotBytes;
  }

 private:
  Segment(std::byte* memory, int world_size);

  std::size_t slot_index(int rank, std::uint32_t message) const {
    const StagingSlot at = staging_slot(rank, world_size_, message);
    return static_cast<std::size_t>(at.owner) * kStagingSlots + at.index;
  }

  SegmentHeader* header_;
  RankLine* lines_;
  DeviceLine* devices_;
  MessageHead* heads_;
  std::byte* staging_;
  int world_size_;
};

}  // namespace pyringar
