// recorders: engines that run csrc/core's templates and record what would happen to shared memory.
//
// Contract  A Bug changes what is recorded, never the template. Every message's payload is new, so
//           that a stale or torn one shows.
// Memory    Laid out as the engines of processes lay it out:
//
//             staged      rank r's slot s holds k slices of two halves, one per rank that will
//                         reduce it; an exchange reads all of it. That engine reads a rank's own
//                         slice where it lies; here it goes through the slot, which is more.
//             record      what call s is lies in calls[s % 2] of each rank, written before the
//                         call's program begins; digests likewise
//             registered  rank r's tensor holds k slices of two halves, each of them two words:
//                         what rank r filled in, and the result, which the slice's rank writes
//                         over it. One word in truth, with two writers; but where all reads are
//                         right, these writes take turns: a result is made of what was filled in,
//                         and rank r fills in again what it has taken out.
//             ring        a link's slot holds two halves
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/ring_program.h"
#include "core/staged_program.h"
#include "recording.h"

namespace pyringar::model {

enum class Bug {
  kNone,
  kWaitsWithoutAcquire,
  kComparesWithoutWrap,
  kBaseStays,
  // staged
  kAnnouncesWithoutRelease,
  kReducedWithoutRelease,
  kAnnouncesFirst,
  kAnnouncedNotAwaited,
  kReducedNotAwaited,
  kOneRankNotAwaited,
  kTwoAhead,
  kAddsOneTwice,
  kReducedLeftBehind,
  kOneCallRecord,
  // ring
  kPublishesWithoutRelease,
  kFreesWithoutRelease,
  kPublishesFirst,
  kFreesBeforeReading,
  kSlotNotAwaited,
  kMessageNotAwaited,
};

struct BugName {
  Bug bug;
  const char* name;
};
inline constexpr std::array<BugName, 20> kBugs = {{
    {Bug::kNone, "none"},
    {Bug::kWaitsWithoutAcquire, "waits-without-acquire"},
    {Bug::kComparesWithoutWrap, "compares-without-wrap"},
    {Bug::kBaseStays, "base-stays"},
    {Bug::kAnnouncesWithoutRelease, "announces-without-release"},
    {Bug::kReducedWithoutRelease, "reduced-without-release"},
    {Bug::kAnnouncesFirst, "announces-first"},
    {Bug::kAnnouncedNotAwaited, "announced-not-awaited"},
    {Bug::kReducedNotAwaited, "reduced-not-awaited"},
    {Bug::kOneRankNotAwaited, "one-rank-not-awaited"},
    {Bug::kTwoAhead, "two-ahead"},
    {Bug::kAddsOneTwice, "adds-one-twice"},
    {Bug::kReducedLeftBehind, "reduced-left-behind"},
    {Bug::kOneCallRecord, "one-call-record"},
    {Bug::kPublishesWithoutRelease, "publishes-without-release"},
    {Bug::kFreesWithoutRelease, "frees-without-release"},
    {Bug::kPublishesFirst, "publishes-first"},
    {Bug::kFreesBeforeReading, "frees-before-reading"},
    {Bug::kSlotNotAwaited, "slot-not-awaited"},
    {Bug::kMessageNotAwaited, "message-not-awaited"},
}};

// A ring belongs to the call that was announced before it; so does a digest, which is an exchange
// of one piece that compares what another exchange or direct call left behind.
// A registered call is a direct one of one piece, on tensors that all ranks reach.
enum class CallKind { kDirect, kRegistered, kExchange, kDigest, kRing, kScatter, kGather };

struct Call {
  CallKind kind;
  std::size_t pieces;
  bool refused = false;  // agree() says no, on every rank; nothing of it is read
  bool is_staged() const { return kind < CallKind::kRing; }
};

struct Setup {
  int num_ranks = 2;
  std::uint32_t slots = kStagingSlots;
  std::uint32_t ring_slots = 0;      // 0: as many as the template asks for
  std::uint32_t base = 0;            // of staged messages and of the ring's
  std::uint32_t reduced_behind = 0;  // how far `reduced` is behind base: messages exchanged since
  std::vector<Call> calls{};
  Bug bug = Bug::kNone;
};

// What run_staged_direct and run_staged_exchange ask of an engine.
class StagedRecorder {
 public:
  // The `sequence`th call of its rank, whose messages follow `base`.
  StagedRecorder(const Setup& setup, const Call& call, int rank, std::uint32_t sequence,
                 std::uint32_t base, Recording& recording)
      : setup_(setup),
        call_(call),
        rank_(rank),
        sequence_(sequence),
        base_(base),
        recording_(recording) {}

  // What run_process_call() does before it runs a program.
  void write_record();

  void copy_in(std::size_t piece, std::uint32_t n);
  void announce(std::uint32_t n);
  bool wait_announced(std::uint32_t n);
  bool agree(std::uint32_t n);
  void reduce(std::size_t piece, std::uint32_t n);
  void publish_reduced(std::uint32_t n);
  bool wait_reduced(std::uint32_t n);
  void copy_out(std::size_t piece, std::uint32_t n);
  void combine(std::size_t piece, std::uint32_t n);

 private:
  std::uint32_t message(std::uint32_t n) const { return n - setup_.base; }
  std::size_t part(int owner, std::uint32_t n, int slice, int half);
  std::size_t filled(int owner, int slice, int half);
  std::size_t result(int owner, int slice, int half);
  std::size_t record(int owner);
  std::size_t announced(int owner);
  std::size_t reduced(int owner);
  void write_message(std::uint32_t n);
  void reduce_registered(std::uint32_t n);
  void take_out_registered(std::uint32_t n);
  void await(std::size_t counter, std::uint32_t n);
  std::vector<int> everybody() const;

  const Setup& setup_;
  const Call& call_;
  const int rank_;
  const std::uint32_t sequence_;
  const std::uint32_t base_;
  Recording& recording_;
};

// What run_ring asks of an engine.
class RingRecorder {
 public:
  RingRecorder(const Setup& setup, const RingProgram& program, Recording& recording);

  bool wait_message(std::uint32_t n, int action);
  bool wait_slot(std::uint32_t n, int action);
  void publish(std::uint32_t n);
  void free_message(std::uint32_t n);
  void send_own(Range range, std::uint32_t n_out);
  void reduce_forward(Range range, std::uint32_t n_in, std::uint32_t n_out);
  void reduce_finish(Range range, std::uint32_t n_in);
  void reduce_finish_forward(Range range, std::uint32_t n_in, std::uint32_t n_out);
  void gather_own(Range range, std::uint32_t n_out);
  void copy_forward(Range range, std::uint32_t n_in, std::uint32_t n_out);
  void copy_last(Range range, std::uint32_t n_in);

  // After the call: every element that this rank should have was kept, once.
  void check_kept();

 private:
  using Halves = std::array<Sum, 2>;

  std::uint32_t message(std::uint32_t n) const { return n - setup_.base; }
  std::uint32_t num_slots() const;
  std::size_t part(int link, std::uint32_t n, int half);
  std::size_t flag(int link);
  std::size_t taken(int link);
  Halves own() const;
  Halves receive(Range range, std::uint32_t n, bool add_own);
  void send(Range range, std::uint32_t n, const Halves& halves);
  void keep(Range range, const Halves& halves);

  const Setup& setup_;
  const RingProgram& program_;
  const int rank_;
  const int in_;   // the link from the rank before
  const int out_;  // the link to the next
  Recording& recording_;
  std::vector<int> kept_;  // by element: how often
};

// All calls on all ranks, finished.
Recording record(const Setup& setup);

}  // namespace pyringar::model
