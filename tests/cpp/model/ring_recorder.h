// ring_recorder: what the ring program does to memory that ranks share; see recorders.h.
#pragma once

#include "core/error.h"
#include "recorders.h"

namespace pyringar::model {

// What run_ring asks of an engine.
class RingRecorder {
 public:
  RingRecorder(const Setup& setup, const RingProgram& program, Recording& recording)
      : setup_(setup),
        program_(program),
        rank_(program.rank),
        in_((program.rank + program.world_size - 1) % program.world_size),
        out_(program.rank),
        recording_(recording),
        kept_(program.numel, 0) {}

  std::uint32_t num_slots() const {
    return setup_.ring_slots > 0 ? setup_.ring_slots : ring_num_slots(program_.world_size);
  }

  bool wait_message(std::uint32_t n, int) {
    if (setup_.bug != "message-not-awaited") {
      recording_.wait(rank_, flag(in_), n, setup_.bug != "waits-without-acquire",
                      setup_.bug != "compares-without-wrap");
    }
    if (setup_.bug == "frees-before-reading") recording_.publish(rank_, taken(in_), n, true);
    return true;
  }
  bool wait_slot(std::uint32_t n, int) {
    if (setup_.bug != "slot-not-awaited") {
      recording_.wait(rank_, taken(out_), n - num_slots(), setup_.bug != "waits-without-acquire",
                      setup_.bug != "compares-without-wrap");
    }
    if (setup_.bug == "publishes-first") recording_.publish(rank_, flag(out_), n, true);
    return true;
  }
  void publish(std::uint32_t n) {
    if (setup_.bug == "publishes-first") return;
    recording_.publish(rank_, flag(out_), n, setup_.bug != "publishes-without-release");
  }
  void free_message(std::uint32_t n) {
    if (setup_.bug == "frees-before-reading") return;
    recording_.publish(rank_, taken(in_), n, setup_.bug != "frees-without-release");
  }
  void send_own(Range range, std::uint32_t n_out) { send(range, n_out, own()); }
  void reduce_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    send(range, n_out, receive(range, n_in, true));
  }
  void reduce_finish(Range range, std::uint32_t n_in) { keep(range, receive(range, n_in, true)); }
  void reduce_finish_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    const Sum sum = receive(range, n_in, true);
    keep(range, sum);
    send(range, n_out, sum);
  }
  void gather_own(Range range, std::uint32_t n_out) {
    keep(range, own());
    send(range, n_out, own());
  }
  void copy_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    const Sum result = receive(range, n_in, false);
    keep(range, result);
    send(range, n_out, result);
  }
  void copy_last(Range range, std::uint32_t n_in) { keep(range, receive(range, n_in, false)); }

  // After the call: every element that this rank should have was kept, once.
  void check_kept() {
    const std::size_t chunk = program_.numel / static_cast<std::size_t>(program_.world_size);
    for (std::size_t at = 0; at < kept_.size(); ++at) {
      const bool is_own = static_cast<int>(at / chunk) == rank_;
      const int wanted = program_.phases == RingPhases::kReduceScatter && !is_own ? 0 : 1;
      if (kept_[at] == wanted) continue;
      recording_.complain(join("rank ", rank_, ": keeps element ", at, " ", kept_[at],
                               " times, expected ", wanted));
    }
  }

 private:
  std::uint32_t message(std::uint32_t n) const { return n - setup_.base; }
  std::size_t slot(int link, std::uint32_t n) {
    return recording_.word(join("slot ", n % num_slots(), " of link ", link), "all", link);
  }
  std::size_t flag(int link) {
    return recording_.counter(join("flag of link ", link), link, setup_.base);
  }
  std::size_t taken(int link) {
    return recording_.counter(join("taken of link ", link), (link + 1) % program_.world_size,
                              setup_.base);
  }
  Sum own() const { return {{rank_}, {}}; }
  Sum receive(Range range, std::uint32_t n, bool add_own) {
    recording_.expect_range(rank_, join("link ", in_), message(n), range.begin, range.end);
    Sum sum{{}, {recording_.read(rank_, slot(in_, n), message(n), Stage::kPart)}};
    if (add_own) sum.own.push_back(rank_);
    return sum;
  }
  void send(Range range, std::uint32_t n, const Sum& sum) {
    recording_.give_range(join("link ", out_), message(n), range.begin, range.end);
    recording_.write(rank_, slot(out_, n), message(n), Stage::kPart, sum);
  }
  void keep(Range range, const Sum& sum) {
    for (std::size_t at = range.begin; at < range.end; ++at) {
      ++kept_[at];
      std::vector<int> expected;
      const std::size_t chunk =
          at / (program_.numel / static_cast<std::size_t>(program_.world_size));
      if (program_.phases == RingPhases::kAllGather) expected = {static_cast<int>(chunk)};
      for (int rank = 0; rank < program_.world_size; ++rank) {
        if (program_.phases != RingPhases::kAllGather) expected.push_back(rank);
      }
      recording_.keep(rank_, join("element ", at), sum, expected);
    }
  }

  const Setup& setup_;
  const RingProgram& program_;
  const int rank_;
  const int in_;   // the link from the rank before
  const int out_;  // the link to the next
  Recording& recording_;
  std::vector<int> kept_;  // by element: how often
};

}  // namespace pyringar::model
