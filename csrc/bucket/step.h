// step: which gradients of one training step exist, on every rank, and which buckets were launched.
//
// Floor     bucket: core and the standard library.
// Units     nanoseconds on the steady clock; 0: not yet.
// Contract  mark() is called for each accumulated gradient. A bucket is complete when all its
//           parameters are marked on all ranks. take_next() returns complete buckets in the order
//           of the plan.
// Threads   one call at a time (the owner holds the GIL).
// Tests     tests/test_bucketing.py, tests/test_bucketing_failures.py
#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "bucket/plan.h"

namespace pyringar {

enum class Mark : std::uint8_t {
  kFirst,     // the first gradient of this parameter in this step
  kAgain,     // marked before; the pass added to the gradient
  kComplete,  // the first, and the last that its bucket waited for
};

struct BucketProgress {
  int missing = 0;  // marks until it is complete
  std::int64_t ready_ns = 0;
  std::int64_t launched_ns = 0;
};

class Step {
 public:
  Step(int world_size, int num_params, const std::vector<Bucket>& plan)
      : bucket_of_(static_cast<std::size_t>(num_params)),
        is_marked_(bucket_of_.size() * static_cast<std::size_t>(world_size)),
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
  bool is_marked(int rank, int param) const { return is_marked_[at(rank, param)]; }
  // Parameters of the first rank in the order of their gradients.
  const std::vector<int>& order() const { return order_; }

  Mark mark(int rank, int param) {
    BucketProgress& bucket = buckets_[bucket_of_[static_cast<std::size_t>(param)]];
    if (is_marked_[at(rank, param)]) return Mark::kAgain;
    is_marked_[at(rank, param)] = true;
    if (begin_ns_ == 0) begin_ns_ = now_ns();
    if (rank == 0) order_.push_back(param);
    if (--bucket.missing > 0) return Mark::kFirst;
    bucket.ready_ns = now_ns();
    return Mark::kComplete;
  }

  void set_launched(int bucket) {
    buckets_.at(static_cast<std::size_t>(bucket)).launched_ns = now_ns();
  }
  bool is_launched(int bucket) const {
    return buckets_[static_cast<std::size_t>(bucket)].launched_ns != 0;
  }

  // The next bucket of the plan if it is complete and no other thread launches a bucket; else -1.
  // A thread that has launched its bucket calls again, with `has_launched`. wait() launches the
  // last bucket after all checks, so no rank ends a step that fails on another rank.
  int take_next(bool has_launched) {
    if (has_launched) is_taken_ = false;
    if (is_taken_ || next_ + 1 >= buckets_.size() || buckets_[next_].missing > 0) return -1;
    is_taken_ = true;
    return static_cast<int>(next_++);
  }

 private:
  static std::int64_t now_ns() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }
  std::size_t at(int rank, int param) const {
    return static_cast<std::size_t>(rank) * bucket_of_.size() + static_cast<std::size_t>(param);
  }

  std::vector<std::size_t> bucket_of_;  // by parameter
  std::vector<bool> is_marked_;         // by rank and parameter
  std::vector<BucketProgress> buckets_;
  std::vector<int> order_;
  std::int64_t begin_ns_ = 0;
  std::size_t next_ = 0;
  bool is_taken_ = false;
};

}  // namespace pyringar
