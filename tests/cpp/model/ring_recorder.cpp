// ring_recorder: what the ring program does to memory that ranks share, and all calls of all ranks;
// see recorders.h.

#include "core/error.h"
#include "recorders.h"

namespace pyringar::model {

RingRecorder::RingRecorder(const Setup& setup, const RingProgram& program, Recording& recording)
    : setup_(setup),
      program_(program),
      rank_(program.rank),
      in_((program.rank + program.world_size - 1) % program.world_size),
      out_(program.rank),
      recording_(recording),
      kept_(program.numel, 0) {}

std::uint32_t RingRecorder::num_slots() const {
  return setup_.ring_slots > 0 ? setup_.ring_slots : ring_num_slots(program_.world_size);
}

std::size_t RingRecorder::part(int link, std::uint32_t n, int half) {
  return recording_.word(join("slot ", n % num_slots(), " of link ", link), join("half ", half),
                         link);
}

std::size_t RingRecorder::flag(int link) {
  return recording_.counter(join("flag of link ", link), link, setup_.base);
}

std::size_t RingRecorder::taken(int link) {
  return recording_.counter(join("taken of link ", link), (link + 1) % program_.world_size,
                            setup_.base);
}

bool RingRecorder::wait_message(std::uint32_t n, int) {
  if (setup_.bug != Bug::kMessageNotAwaited) {
    recording_.wait(rank_, flag(in_), n, setup_.bug != Bug::kWaitsWithoutAcquire,
                    setup_.bug != Bug::kComparesWithoutWrap);
  }
  if (setup_.bug == Bug::kFreesBeforeReading) recording_.publish(rank_, taken(in_), n, true);
  return true;
}

bool RingRecorder::wait_slot(std::uint32_t n, int) {
  if (setup_.bug != Bug::kSlotNotAwaited) {
    recording_.wait(rank_, taken(out_), n - num_slots(), setup_.bug != Bug::kWaitsWithoutAcquire,
                    setup_.bug != Bug::kComparesWithoutWrap);
  }
  if (setup_.bug == Bug::kPublishesFirst) recording_.publish(rank_, flag(out_), n, true);
  return true;
}

void RingRecorder::publish(std::uint32_t n) {
  if (setup_.bug == Bug::kPublishesFirst) return;
  recording_.publish(rank_, flag(out_), n, setup_.bug != Bug::kPublishesWithoutRelease);
}

void RingRecorder::free_message(std::uint32_t n) {
  if (setup_.bug == Bug::kFreesBeforeReading) return;
  recording_.publish(rank_, taken(in_), n, setup_.bug != Bug::kFreesWithoutRelease);
}

RingRecorder::Halves RingRecorder::own() const { return {Sum{{rank_}, {}}, Sum{{rank_}, {}}}; }

RingRecorder::Halves RingRecorder::receive(Range range, std::uint32_t n, bool add_own) {
  recording_.expect_range(rank_, join("link ", in_), message(n), range.begin, range.end);
  Halves halves;
  for (int half = 0; half < 2; ++half) {
    Sum& sum = halves[static_cast<std::size_t>(half)];
    sum.reads.push_back(recording_.read(rank_, part(in_, n, half), message(n), Stage::kPart));
    if (add_own) sum.own.push_back(rank_);
  }
  return halves;
}

void RingRecorder::send(Range range, std::uint32_t n, const Halves& halves) {
  recording_.give_range(join("link ", out_), message(n), range.begin, range.end);
  for (int half = 0; half < 2; ++half) {
    recording_.write(rank_, part(out_, n, half), message(n), Stage::kPart,
                     halves[static_cast<std::size_t>(half)]);
  }
}

void RingRecorder::keep(Range range, const Halves& halves) {
  for (std::size_t at = range.begin; at < range.end; ++at) {
    ++kept_[at];
    std::vector<int> expected;
    const std::size_t chunk = at / (program_.numel / static_cast<std::size_t>(program_.world_size));
    if (program_.phases == RingPhases::kAllGather) expected = {static_cast<int>(chunk)};
    for (int rank = 0; rank < program_.world_size; ++rank) {
      if (program_.phases != RingPhases::kAllGather) expected.push_back(rank);
    }
    for (const Sum& half : halves) recording_.keep(rank_, join("element ", at), half, expected);
  }
}

void RingRecorder::check_kept() {
  const std::size_t chunk = program_.numel / static_cast<std::size_t>(program_.world_size);
  for (std::size_t at = 0; at < kept_.size(); ++at) {
    const bool is_own = static_cast<int>(at / chunk) == rank_;
    const int wanted = program_.phases == RingPhases::kReduceScatter && !is_own ? 0 : 1;
    if (kept_[at] == wanted) continue;
    recording_.complain(
        join("rank ", rank_, ": keeps element ", at, " ", kept_[at], " times, expected ", wanted));
  }
}

void RingRecorder::send_own(Range range, std::uint32_t n_out) { send(range, n_out, own()); }

void RingRecorder::reduce_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
  send(range, n_out, receive(range, n_in, true));
}

void RingRecorder::reduce_finish(Range range, std::uint32_t n_in) {
  keep(range, receive(range, n_in, true));
}

void RingRecorder::reduce_finish_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
  const Halves sum = receive(range, n_in, true);
  keep(range, sum);
  send(range, n_out, sum);
}

void RingRecorder::gather_own(Range range, std::uint32_t n_out) {
  keep(range, own());
  send(range, n_out, own());
}

void RingRecorder::copy_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
  const Halves result = receive(range, n_in, false);
  keep(range, result);
  send(range, n_out, result);
}

void RingRecorder::copy_last(Range range, std::uint32_t n_in) {
  keep(range, receive(range, n_in, false));
}

namespace {

RingPhases phases_of(CallKind kind) {
  if (kind == CallKind::kScatter) return RingPhases::kReduceScatter;
  return kind == CallKind::kGather ? RingPhases::kAllGather : RingPhases::kAllReduce;
}

// As ProcessRank::count_messages() does, whatever the ranks meant to send.
constexpr std::uint32_t kMostRefused = 2;

// One rank's calls, one after the other.
void record_rank(const Setup& setup, int rank, Recording& recording) {
  std::uint32_t staged = setup.base;
  std::uint32_t sent = setup.base;
  std::uint32_t sequence = 0;
  for (const Call& call : setup.calls) {
    bool returned = true;
    if (call.is_staged()) {
      if (call.kind != CallKind::kDigest) ++sequence;
      StagedRecorder engine(setup, call, rank, sequence, staged, recording);
      const StagedProgram program{staged, call.pieces};
      if (call.kind != CallKind::kDigest) engine.write_record();
      const bool is_exchange = call.kind == CallKind::kExchange || call.kind == CallKind::kDigest;
      returned =
          is_exchange ? run_staged_exchange(engine, program) : run_staged_direct(engine, program);
      const auto pieces = static_cast<std::uint32_t>(call.pieces);
      if (setup.bug != Bug::kBaseStays) staged += call.refused ? kMostRefused : pieces;
    } else {
      RingProgram program{};
      program.rank = rank;
      program.world_size = setup.num_ranks;
      program.numel = call.pieces * static_cast<std::size_t>(setup.num_ranks);
      program.piece_elems = 1;
      program.phases = phases_of(call.kind);
      program.base = sent;
      RingRecorder engine(setup, program, recording);
      returned = run_ring(engine, program);
      engine.check_kept();
      if (setup.bug != Bug::kBaseStays) sent += ring_num_messages(program);
    }
    if (returned == call.refused) {
      recording.complain(join("rank ", rank, ": a call returned ", returned));
    }
  }
}

}  // namespace

Recording record(const Setup& setup) {
  Recording recording(setup.num_ranks);
  for (int rank = 0; rank < setup.num_ranks; ++rank) record_rank(setup, rank, recording);
  recording.finish();
  return recording;
}

}  // namespace pyringar::model
