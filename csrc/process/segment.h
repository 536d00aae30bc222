// segment: the layout of the memory that the processes of one group share.
//
// Contract  One writer per word: rank r writes line r and its slots, which two ranks swap as
//           core/staged_program.h says; only `failure` is written by the first rank that fails.
//
//             header    version, token, failure
//             lines     one per rank: counters, the calls it makes, its process
//             devices   one per rank: the counters that its GPU writes, on pages of their own,
//                       which CUDA can register; of a rank that is lost, others raise them
//             heads     one per slot of staging: what its message is, or holds if it is small
//             staging   kStagingSlots per rank
//
//           The rank that makes the segment allocates all pages: too little memory is its error.
// Threads   counters and states are atomic; the rest of a line is published by them.
// Tests     tests/conformance/test_bits.py, tests/cpp/process_test.cpp
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "core/collective.h"
#include "core/error.h"
#include "core/staged_program.h"
#include "os/process.h"
#include "os/thread.h"
#include "os/wait.h"

namespace pyringar {

// What a rank has called, for the others to compare with their own.
struct alignas(64) CallRecord {
  std::uint64_t sequence = 0;  // calls of this rank, this one included; 0: not made yet
  std::uint64_t numel = 0;     // of all its tensors
  std::uint64_t shapes = 0;    // digest of sizes and dtypes of all its tensors
  std::uint64_t strides = 0;   // of those not in the order of their index; 0: all are
  std::uint32_t num_tensors = 0;
  std::int32_t root = 0;
  CallKind kind = CallKind::kBarrier;
  DType dtype = DType::kFloat32;  // of the first tensor
  ReduceOp op = ReduceOp::kSum;
  std::uint16_t divisor = 1;
  Order order = Order::kRank;
  std::array<char, 80> what{};  // the call that it stands for, in words; empty: it is that call

  bool operator==(const CallRecord&) const = default;
  // Whether it is the same call. How each rank's own tensors lie is another question.
  bool agrees(CallRecord other) const {
    other.strides = strides;
    return *this == other;
  }
  bool lies_like(const CallRecord& other) const { return strides == other.strides; }
  std::uint64_t digest() const;  // equal digests: the same call, and tensors that lie alike
  std::string text() const;
};
static_assert(sizeof(CallRecord) == 128, "two cache lines");

enum class RankState : std::uint32_t { kAbsent, kJoined, kLeft };

struct alignas(64) RankLine {
  Flag announced;  // see core/staged_program.h
  Flag reduced;
  std::array<CallRecord, 2> calls;  // of call s in calls[s % 2]: a rank is at most one call ahead
  alignas(64) std::atomic<RankState> state{RankState::kAbsent};
  std::atomic<std::int32_t> core{-1};      // where it ran when it last looked
  std::atomic<std::int64_t> heard_ns{0};   // on the monotonic clock; 0: never
  std::atomic<std::uint32_t> progress{0};  // grows within long work on a piece, or on none
  CoreSet cores;                           // it may use
  ProcessId process;
  std::atomic<int> global_rank{0};  // of torchrun; see death_notice.h
  std::array<char, 64> host{};
};

// What the others look at first: one line in place of three (counter, record, slot), each of which
// takes 0.1 us to come from another core. Written before `announced`; free when the slot is.
struct alignas(64) MessageHead {
  static constexpr std::size_t kPayloadBytes = 48;
  std::atomic<std::uint32_t> number{0};  // of the message; written last
  std::uint64_t call_digest = 0;
  std::array<std::byte, kPayloadBytes> payload{};  // in place of the slot, if all of it fits
};
static_assert(sizeof(MessageHead) == 64, "one cache line");

// How far a rank's GPU is (cuda_process/device_watch.h). The GPU writes one word per cache line.
struct DeviceLine {
  struct alignas(64) Word {
    std::atomic<std::uint32_t> value{0};
  };
  Word announced;
  Word reduced;
  Word finished;
  Word probe;                                          // before the first message: do words arrive?
  alignas(64) std::atomic<std::uint64_t> released{0};  // 0: the words are the GPU's own
};
static_assert(sizeof(DeviceLine) == 5 * 64 && sizeof(DeviceLine::Word) == 64);

// By how much a rank, or its GPU, has done more than another, in the first counter that differs.
template <typename Line>
std::int32_t lead_of(const Line& a, const Line& b) {
  const auto ahead = [](const auto& x, const auto& y) {
    return static_cast<std::int32_t>(x.value.load(std::memory_order_acquire) -
                                     y.value.load(std::memory_order_acquire));
  };
  const std::int32_t announced = ahead(a.announced, b.announced);
  return announced != 0 ? announced : ahead(a.reduced, b.reduced);
}

struct SharedFailure {
  enum State : std::uint32_t { kNone, kWriting, kThere };
  std::atomic<std::uint32_t> state{kNone};
  ErrorKind kind = ErrorKind::kState;
  std::array<char, 504> text{};
};

// Of a staging slot: small enough that own tensor, own slot and the others' stay in a core's L2.
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
  // The first process lays it out; attach() throws where another token or version stands.
  static Segment lay_out(std::byte* memory, int world_size, const SegmentToken& token);
  static Segment attach(std::byte* memory, int world_size, const SegmentToken& token);

  int world_size() const { return world_size_; }

  RankLine& line(int rank) const { return lines_[rank]; }
  DeviceLine& device(int rank) const { return devices_[rank]; }
  std::size_t devices_bytes() const;  // of all ranks' device lines, in whole pages
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
