// staged_recorder: what the staged programs do to memory that ranks share; see recorders.h.

#include "core/error.h"
#include "recorders.h"

namespace pyringar::model {

namespace {

constexpr int kHalves = 2;

}  // namespace

std::size_t StagedRecorder::part(int owner, std::uint32_t n, int slice, int half) {
  return recording_.word(join("slot ", n % setup_.slots, " of rank ", owner),
                         join("slice ", slice, ", half ", half), owner);
}

std::size_t StagedRecorder::description(int owner, std::uint32_t n) {
  return recording_.word(join("slot ", n % setup_.slots, " of rank ", owner), "description", owner);
}

std::size_t StagedRecorder::announced(int owner) {
  return recording_.counter(join("announced of rank ", owner), owner, setup_.base);
}

std::size_t StagedRecorder::reduced(int owner) {
  return recording_.counter(join("reduced of rank ", owner), owner,
                            setup_.base - setup_.reduced_behind);
}

std::vector<int> StagedRecorder::everybody() const {
  std::vector<int> ranks;
  for (int rank = 0; rank < setup_.num_ranks; ++rank) ranks.push_back(rank);
  return ranks;
}

void StagedRecorder::write_message(std::size_t piece, std::uint32_t n) {
  if (piece == 0) {
    recording_.write(rank_, description(rank_, n), message(n), Stage::kCall, {});
  }
  for (int slice = 0; slice < setup_.num_ranks; ++slice) {
    for (int half = 0; half < kHalves; ++half) {
      recording_.write(rank_, part(rank_, n, slice, half), message(n), Stage::kPart, {{rank_}, {}});
    }
  }
}

void StagedRecorder::copy_in(std::size_t piece, std::uint32_t n) {
  if (setup_.bug == Bug::kAnnouncesFirst) {
    recording_.publish(rank_, announced(rank_), n, true);
  }
  if (setup_.bug != Bug::kTwoAhead) return write_message(piece, n);
  // The template is one ahead; so is this, once more.
  if (piece == 0) {
    write_message(0, n);
    recording_.publish(rank_, announced(rank_), n, true);
  }
  if (piece + 1 < call_.pieces) {
    write_message(piece + 1, n + 1);
    recording_.publish(rank_, announced(rank_), n + 1, true);
  }
}

void StagedRecorder::announce(std::uint32_t n) {
  if (setup_.bug == Bug::kAnnouncesFirst || setup_.bug == Bug::kTwoAhead) return;
  recording_.publish(rank_, announced(rank_), n, setup_.bug != Bug::kAnnouncesWithoutRelease);
}

void StagedRecorder::await(std::size_t counter, std::uint32_t n) {
  recording_.wait(rank_, counter, n, setup_.bug != Bug::kWaitsWithoutAcquire,
                  setup_.bug != Bug::kComparesWithoutWrap);
}

bool StagedRecorder::wait_announced(std::uint32_t n) {
  if (setup_.bug == Bug::kAnnouncedNotAwaited) return true;
  for (int owner = 0; owner < setup_.num_ranks; ++owner) await(announced(owner), n);
  return true;
}

bool StagedRecorder::agree(std::uint32_t n) {
  for (int owner = 0; owner < setup_.num_ranks; ++owner) {
    recording_.read(rank_, description(owner, n), message(n), Stage::kCall);
  }
  return !call_.refused;
}

void StagedRecorder::reduce(std::size_t, std::uint32_t n) {
  for (int half = 0; half < kHalves; ++half) {
    Sum sum;
    for (int owner = 0; owner < setup_.num_ranks; ++owner) {
      const bool twice = setup_.bug == Bug::kAddsOneTwice && owner == 1;
      sum.reads.push_back(recording_.read(rank_, part(twice ? 0 : owner, n, rank_, half),
                                          message(n), Stage::kPart));
    }
    recording_.write(rank_, part(rank_, n, rank_, half), message(n), Stage::kSum, sum);
  }
}

void StagedRecorder::publish_reduced(std::uint32_t n) {
  recording_.publish(rank_, reduced(rank_), n, setup_.bug != Bug::kReducedWithoutRelease);
}

bool StagedRecorder::wait_reduced(std::uint32_t n) {
  if (setup_.bug == Bug::kReducedNotAwaited) return true;
  for (int owner = 0; owner < setup_.num_ranks; ++owner) {
    const bool forgotten = owner == (rank_ + 1) % setup_.num_ranks;
    if (setup_.bug == Bug::kOneRankNotAwaited && forgotten) continue;
    await(reduced(owner), n);
  }
  return true;
}

void StagedRecorder::copy_out(std::size_t piece, std::uint32_t n) {
  for (int slice = 0; slice < setup_.num_ranks; ++slice) {
    for (int half = 0; half < kHalves; ++half) {
      const std::size_t read =
          recording_.read(rank_, part(slice, n, slice, half), message(n), Stage::kSum);
      recording_.keep(rank_, join("slice ", slice, " of piece ", piece), {{}, {read}}, everybody());
    }
  }
}

void StagedRecorder::combine(std::size_t piece, std::uint32_t n) {
  for (int slice = 0; slice < setup_.num_ranks; ++slice) {
    for (int half = 0; half < kHalves; ++half) {
      Sum sum;
      for (int owner = 0; owner < setup_.num_ranks; ++owner) {
        sum.reads.push_back(
            recording_.read(rank_, part(owner, n, slice, half), message(n), Stage::kPart));
      }
      recording_.keep(rank_, join("slice ", slice, " of piece ", piece), sum, everybody());
    }
  }
}

}  // namespace pyringar::model
