// recorders: all calls of all ranks, one rank after the other; see recorders.h.

#include "recorders.h"

#include "core/error.h"
#include "ring_recorder.h"
#include "staged_recorder.h"

namespace pyringar::model {

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
      ++sequence;
      StagedRecorder engine(setup, call, rank, sequence, staged, recording);
      const StagedProgram program{staged, call.pieces};
      engine.write_record();
      returned = call.kind == CallKind::kExchange ? run_staged_exchange(engine, program)
                                                  : run_staged_direct(engine, program);
      const auto pieces = static_cast<std::uint32_t>(call.pieces);
      if (setup.bug != "base-stays") staged += call.refused ? kMostRefused : pieces;
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
      if (setup.bug != "base-stays") sent += ring_num_messages(program);
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
