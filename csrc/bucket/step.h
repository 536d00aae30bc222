// step: which gradients of one training step are there, on every rank, and what has left.
//
// Floor     bucket: core and the standard library; whoever owns it launches what is complete.
// Units     nanoseconds on the steady clock; 0: did not happen.
// Contract  made afresh for every step. mark() is called for each gradient that a backward pass has
//           finished, with the number of that pass (1, 2, ...); a bucket is complete when all its
//           parameters are marked on all ranks. Where buckets must leave in one order, take_turn()
//           says which is next. Passes outlive steps: their owner calls end() for each, also for
//           one that failed, and break_off() where a step cannot go on.
// Threads   one call at a time (its owner holds the GIL).
// Tests     tests/test_bucketing.py, tests/test_bucketing_failures.py
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <set>
#include <vector>

#include "bucket/plan.h"

namespace pyringar {

enum class Mark : std::uint8_t {
  kCounted,         // more of the bucket is to come
  kComplete,        // the bucket can go
  kAgain,           // counted before, the bucket has not gone: more was added to the gradient
  kStillRuns,       // counted by another backward pass that has not ended
  kAfterLaunch,     // the bucket has gone: this gradient would be lost
  kAfterOwnLaunch,  // likewise, and the same pass had completed a bucket that has gone
};

class Passes {
 public:
  // True for a pass that was not known.
  bool begin(std::int64_t pass) { return running_.insert(pass).second; }
  // True if a step could still count on this pass.
  bool end(std::int64_t pass) { return broken_.erase(pass) == 0 && running_.erase(pass) > 0; }
  bool is_running(std::int64_t pass) const { return running_.count(pass) > 0; }
  bool is_broken(std::int64_t pass) const { return broken_.count(pass) > 0; }
  bool any_running() const { return !running_.empty(); }

  void forget_running() { running_.clear(); }

  // What running passes still mark counts for no step, but for one (0: none).
  void break_off(std::int64_t spared_pass) {
    const bool is_spared_running = running_.erase(spared_pass) > 0;
    broken_.merge(running_);
    running_.clear();
    if (is_spared_running) running_.insert(spared_pass);
  }

 private:
  std::set<std::int64_t> running_;
  std::set<std::int64_t> broken_;  // ran when their step broke off
};

struct BucketProgress {
  int missing = 0;  // marks that are to come
  std::int64_t ready_ns = 0;
  std::int64_t launched_ns = 0;
  std::int64_t pass = 0;  // that completed it
};

class Step {
 public:
  Step(int world_size, int num_params, const std::vector<Bucket>& plan)
      : bucket_of_(static_cast<std::size_t>(num_params)),
        marked_by_(bucket_of_.size() * static_cast<std::size_t>(world_size)),
        buckets_(plan.size()) {
    for (std::size_t bucket = 0; bucket < plan.size(); ++bucket) {
      buckets_[bucket].missing = world_size * static_cast<int>(plan[bucket].size());
      for (const int param : plan[bucket]) bucket_of_.at(static_cast<std::size_t>(param)) = bucket;
    }
  }

  const std::vector<BucketProgress>& buckets() const { return buckets_; }
  std::int64_t begin_ns() const { return begin_ns_; }
  int bucket_of(int param) const {
    return static_cast<int>(bucket_of_[static_cast<std::size_t>(param)]);
  }
  bool is_marked(int rank, int param) const { return marked_by_[at(rank, param)] != 0; }
  // Rank 0's parameters in the order in which they came: one that does not depend on which rank
  // was first.
  const std::vector<int>& ready() const { return ready_; }

  Mark mark(int rank, int param, std::int64_t pass, const Passes& passes) {
    BucketProgress& bucket = buckets_[bucket_of_[static_cast<std::size_t>(param)]];
    std::int64_t& by = marked_by_[at(rank, param)];
    if (by != 0 && by != pass && passes.is_running(by)) return Mark::kStillRuns;
    if (bucket.launched_ns != 0) {
      return has_launched(pass) ? Mark::kAfterOwnLaunch : Mark::kAfterLaunch;
    }
    if (by != 0) return Mark::kAgain;
    by = pass;
    if (begin_ns_ == 0) begin_ns_ = now_ns();
    if (rank == 0) ready_.push_back(param);
    if (--bucket.missing > 0) return Mark::kCounted;
    bucket.ready_ns = now_ns();
    bucket.pass = pass;
    return Mark::kComplete;
  }

  void launched(int bucket) {
    buckets_.at(static_cast<std::size_t>(bucket)).launched_ns = now_ns();
  }

  // The next bucket, in order, if it is complete and nobody else is sending; else -1. Whoever gets
  // one sends it and asks again, with `has_sent`. The last bucket has no turn: its owner sends it
  // once all passes have ended.
  int take_turn(bool has_sent) {
    if (has_sent) is_turn_taken_ = false;
    const bool is_next =
        !is_turn_taken_ && next_turn_ + 1 < buckets_.size() && buckets_[next_turn_].missing == 0;
    if (!is_next) return -1;
    is_turn_taken_ = true;
    return static_cast<int>(next_turn_++);
  }

 private:
  static std::int64_t now_ns() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }
  std::size_t at(int rank, int param) const {
    return static_cast<std::size_t>(rank) * bucket_of_.size() + static_cast<std::size_t>(param);
  }
  // Whether a bucket that this pass completed has gone.
  bool has_launched(std::int64_t pass) const {
    return std::any_of(buckets_.begin(), buckets_.end(), [&](const BucketProgress& bucket) {
      return bucket.pass == pass && bucket.launched_ns != 0;
    });
  }

  std::vector<std::size_t> bucket_of_;   // by parameter
  std::vector<std::int64_t> marked_by_;  // by rank and parameter: the pass, or 0
  std::vector<BucketProgress> buckets_;
  std::vector<int> ready_;
  std::int64_t begin_ns_ = 0;
  std::size_t next_turn_ = 0;
  bool is_turn_taken_ = false;
};

}  // namespace pyringar
