// staged_recorder: what the staged programs do to memory that ranks share; see recorders.h.
#pragma once

#include "core/error.h"
#include "recorders.h"

namespace pyringar::model {

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
  void write_record() { recording_.write(rank_, record(rank_), sequence_, Stage::kCall, {}); }

  void copy_in(std::size_t piece, std::uint32_t n) {
    if (setup_.bug == "announces-first") {
      recording_.publish(rank_, announced(rank_), n, true);
    }
    if (setup_.bug != "two-ahead") return write_message(n);
    // The template is one ahead; so is this, once more.
    if (piece == 0) {
      write_message(n);
      recording_.publish(rank_, announced(rank_), n, true);
    }
    if (piece + 1 < call_.pieces) {
      write_message(n + 1);
      recording_.publish(rank_, announced(rank_), n + 1, true);
    }
  }
  void announce(std::uint32_t n) {
    if (setup_.bug == "announces-first" || setup_.bug == "two-ahead") return;
    recording_.publish(rank_, announced(rank_), n, setup_.bug != "announces-without-release");
  }
  bool wait_announced(std::uint32_t n) {
    if (setup_.bug == "announced-not-awaited") return true;
    for (int owner = 0; owner < setup_.num_ranks; ++owner) await(announced(owner), n);
    return true;
  }
  bool agree(std::uint32_t) {
    for (int owner = 0; owner < setup_.num_ranks; ++owner) {
      recording_.read(rank_, record(owner), sequence_, Stage::kCall);
    }
    return !call_.refused;
  }
  void reduce(std::size_t, std::uint32_t n) {
    Sum sum;
    for (int owner = 0; owner < setup_.num_ranks; ++owner) {
      const bool twice = setup_.bug == "adds-one-twice" && owner == 1;
      sum.reads.push_back(read(part(twice ? 0 : owner, n, rank_), n, Stage::kPart));
    }
    recording_.write(rank_, part(rank_, n, rank_), message(n), Stage::kSum, sum);
  }
  void publish_reduced(std::uint32_t n) {
    if (setup_.bug == "reduced-left-behind" && n == base_) return;
    recording_.publish(rank_, reduced(rank_), n, setup_.bug != "reduced-without-release");
  }
  bool wait_reduced(std::uint32_t n) {
    if (setup_.bug == "reduced-not-awaited") return true;
    for (int owner = 0; owner < setup_.num_ranks; ++owner) {
      const bool forgotten = owner == (rank_ + 1) % setup_.num_ranks;
      if (setup_.bug == "one-rank-not-awaited" && forgotten) continue;
      await(reduced(owner), n);
    }
    return true;
  }
  void copy_out(std::size_t piece, std::uint32_t n) {
    check_agreed();
    for (int slice = 0; slice < setup_.num_ranks; ++slice) {
      keep(piece, slice, {{}, {read(part(slice, n, slice), n, Stage::kSum)}});
    }
  }
  void combine(std::size_t piece, std::uint32_t n) {
    check_agreed();
    for (int slice = 0; slice < setup_.num_ranks; ++slice) {
      Sum sum;
      for (int owner = 0; owner < setup_.num_ranks; ++owner) {
        sum.reads.push_back(read(part(owner, n, slice), n, Stage::kPart));
      }
      keep(piece, slice, sum);
    }
  }

 private:
  std::uint32_t message(std::uint32_t n) const { return n - setup_.base; }
  std::size_t part(int owner, std::uint32_t n, int slice) {
    const bool swaps = setup_.swaps && setup_.num_ranks == 2;
    const StagingSlot slot = swaps ? staging_slot(owner, setup_.num_ranks, n, setup_.slots)
                                   : StagingSlot{owner, n % setup_.slots};
    return recording_.word(join("slot ", slot.index, " of rank ", slot.owner),
                           join("slice ", slice), swaps ? kNobody : owner);
  }
  std::size_t record(int owner) {
    const std::uint32_t parity = setup_.bug == "one-call-record" ? 0 : sequence_ % 2;
    return recording_.word(join("calls[", parity, "] of rank ", owner), "", owner);
  }
  std::size_t announced(int owner) {
    return recording_.counter(join("announced of rank ", owner), owner, setup_.base);
  }
  std::size_t reduced(int owner) {
    return recording_.counter(join("reduced of rank ", owner), owner,
                              setup_.base - setup_.reduced_behind);
  }
  std::size_t read(std::size_t word, std::uint32_t n, Stage stage) {
    return recording_.read(rank_, word, message(n), stage);
  }
  void write_message(std::uint32_t n) {
    for (int slice = 0; slice < setup_.num_ranks; ++slice) {
      recording_.write(rank_, part(rank_, n, slice), message(n), Stage::kPart, {{rank_}, {}});
    }
  }
  void check_agreed() {
    if (call_.refused) recording_.complain(join("rank ", rank_, ": takes out what it refused"));
  }
  void keep(std::size_t piece, int slice, const Sum& sum) {
    std::vector<int> all_ranks;
    for (int rank = 0; rank < setup_.num_ranks; ++rank) all_ranks.push_back(rank);
    recording_.keep(rank_, join("slice ", slice, " of piece ", piece), sum, all_ranks);
  }
  void await(std::size_t counter, std::uint32_t n) {
    recording_.wait(rank_, counter, n, setup_.bug != "waits-without-acquire",
                    setup_.bug != "compares-without-wrap");
  }

  const Setup& setup_;
  const Call& call_;
  const int rank_;
  const std::uint32_t sequence_;
  const std::uint32_t base_;
  Recording& recording_;
};

}  // namespace pyringar::model
