// bucketer: counts which gradients are there, on every rank, and says which bucket is complete.
//
// Floor     bucket: core and the standard library; whoever owns it launches what is complete.
// Units     nanoseconds on the steady clock.
// Contract  mark() is called once for each rank and parameter of a step; a bucket is complete when
//           all its parameters are marked on all ranks. Marks name the backward pass they come
//           from. The owner calls end_pass() for each, also for one that failed, and break_off()
//           where a step cannot go on: what passes that run then still mark counts for no step.
//           Where buckets must leave in one order, take_turn() says which is next.
// Threads   one call at a time (its owner holds the GIL).
// Tests     tests/test_bucketing.py
#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "bucket/plan.h"

namespace pyringar {

enum class Mark : std::uint8_t {
  kCounted,      // more of the bucket is to come
  kComplete,     // the bucket can go
  kAgain,        // counted before, the bucket has not gone: more was added to the gradient
  kStillRuns,    // counted by another backward pass that has not ended
  kAfterLaunch,  // the bucket has gone: this gradient would be lost
};

struct BucketTimes {
  std::int64_t ready_ns = 0;  // 0: did not happen
  std::int64_t launched_ns = 0;
  std::int64_t pass = 0;  // that completed it
};

class Bucketer {
 public:
  Bucketer(int world_size, std::vector<BucketItem> items, std::size_t first_cap_bytes,
           std::size_t cap_bytes);

  int world_size() const { return world_size_; }
  int num_params() const { return static_cast<int>(items_.size()); }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const std::vector<BucketTimes>& times() const { return times_; }
  std::int64_t begin_ns() const { return begin_ns_; }
  std::size_t bytes_of(int bucket) const;

  Mark mark(int rank, int param, std::int64_t pass);
  bool is_marked(int rank, int param) const { return marked_by_[at(rank, param)] != 0; }
  int bucket_of(int param) const { return bucket_of_[static_cast<std::size_t>(param)]; }
  void launched(int bucket);
  bool is_launched(int bucket) const {
    return times_[static_cast<std::size_t>(bucket)].launched_ns != 0;
  }
  // The next bucket, in order, if it is complete and nobody else is sending; else -1. Whoever gets
  // one sends it and asks again, with `has_sent`. The last bucket has no turn: its owner sends it
  // once all passes have ended.
  int take_turn(bool has_sent);
  // Whether a bucket that this pass completed has gone.
  bool has_launched(std::int64_t pass) const;
  bool has_marks() const { return begin_ns_ != 0; }

  // True for a pass that was not known: the owner sees to it that end_pass() is called.
  bool begin_pass(std::int64_t pass) { return running_.insert(pass).second; }
  // True if the step could still count on this pass.
  bool end_pass(std::int64_t pass) { return broken_.erase(pass) == 0 && running_.erase(pass) > 0; }
  bool is_broken(std::int64_t pass) const { return !broken_.empty() && broken_.count(pass) > 0; }
  bool has_unfinished_pass() const { return !running_.empty(); }

  // Parameters in the order in which the last rank had them; those that nobody had come last.
  std::vector<int> ready_order() const;
  void plan(const std::vector<int>& order);  // between steps
  void reset();                              // forget all marks
  // Forget all marks, and those that passes under way will make, but for one pass that belongs to
  // the next step (0: none).
  void break_off(std::int64_t spared_pass);

 private:
  std::size_t at(int rank, int param) const;

  const int world_size_;
  const std::vector<BucketItem> items_;
  const std::size_t first_cap_bytes_;
  const std::size_t cap_bytes_;
  std::vector<Bucket> buckets_;
  std::vector<int> bucket_of_;
  std::vector<int> missing_;             // by bucket: marks that are to come
  std::vector<int> ranks_ready_;         // by parameter
  std::vector<std::int64_t> marked_by_;  // by rank and parameter: the pass, or 0
  std::vector<int> ready_;               // parameters, as their last rank came
  std::vector<BucketTimes> times_;
  std::set<std::int64_t> running_;
  std::set<std::int64_t> broken_;  // ran when their step broke off
  std::int64_t begin_ns_ = 0;
  std::size_t next_turn_ = 0;
  bool is_turn_taken_ = false;
};

}  // namespace pyringar
