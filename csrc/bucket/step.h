// step: plans buckets of parameters, and counts the gradients of one training step.
// Units     times in nanoseconds on the steady clock; 0: the event has not happened.
// Contract  Call count() for each accumulated gradient. A bucket is complete when all its
//           parameters are counted on all ranks of this process.
// Threads   One call at a time: the owner holds the GIL.
// Tests     tests/test_bucketing.py, tests/test_bucketing_sums.py
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pyringar {

// plan_buckets() assigns the parameters to buckets, in `order`. A bucket holds parameters of one
// dtype and closes when its bytes reach the cap; first_cap_bytes is the cap of the first bucket.
// Buckets are in the order in which they close.
using BucketItem = std::pair<std::size_t, int>;  // bytes of a parameter, number of its dtype
using Bucket = std::vector<std::size_t>;

inline std::vector<Bucket> plan_buckets(const std::vector<BucketItem>& items,
                                        const std::vector<std::size_t>& order,
                                        std::size_t first_cap_bytes, std::size_t cap_bytes) {
  struct Open {
    int kind;
    std::size_t bytes;
    Bucket bucket;
  };
  std::vector<Bucket> closed;
  std::vector<Open> open;  // one open bucket per dtype, in the order of their first parameters
  for (const std::size_t index : order) {
    const auto& [bytes, kind] = items.at(index);
    std::size_t at = 0;
    while (at < open.size() && open[at].kind != kind) ++at;
    if (at == open.size()) open.push_back({kind, 0, {}});
    open[at].bytes += bytes;
    open[at].bucket.push_back(index);
    if (open[at].bytes < (closed.empty() ? first_cap_bytes : cap_bytes)) continue;
    closed.push_back(std::move(open[at].bucket));
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
  }
  for (Open& rest : open) closed.push_back(std::move(rest.bucket));
  return closed;
}

enum class GradState : std::uint8_t {
  kUnchanged,  // no backward pass has added to the gradient since its last reduction
  kStaleSum,   // unchanged; rank 0 keeps the reduced sum, so zero this copy before adding to it
  kUncounted,  // backward passes have added to the gradient without a call of count()
  kCounted,    // count() was called in this step
};

struct Step {
  const std::size_t world_size;  // number of ranks in this process
  const std::size_t num_params;
  const std::size_t first_summed;  // lowest rank that zeroes the last sum before it accumulates
  std::vector<GradState> held =
      std::vector<GradState>(world_size * num_params);  // of each gradient, by rank and parameter
  std::vector<std::size_t> bucket_of = std::vector<std::size_t>(num_params);
  std::vector<std::size_t> missing = {};  // per bucket: number of gradients not counted yet
  std::vector<std::int64_t> ready_ns = {};
  std::vector<std::int64_t> launched_ns = {};
  std::vector<std::size_t> order = {};  // parameters in the order in which rank 0 counted them
  std::int64_t begin_ns = 0;
  std::size_t next = 0;

  GradState& at(std::size_t rank, std::size_t param) { return held.at(rank * num_params + param); }

  void start(const std::vector<Bucket>& plan, const std::vector<std::size_t>& reduced) {
    for (std::size_t rank = 0; rank < world_size; ++rank) {
      const GradState after = rank < first_summed ? GradState::kUnchanged : GradState::kStaleSum;
      for (const std::size_t param : reduced) at(rank, param) = after;
    }
    missing.assign(plan.size(), 0);
    for (std::size_t bucket = 0; bucket < plan.size(); ++bucket) {
      missing[bucket] = world_size * plan[bucket].size();
      for (const std::size_t param : plan[bucket]) bucket_of.at(param) = bucket;
    }
    ready_ns.assign(plan.size(), 0);
    launched_ns.assign(plan.size(), 0);
    order.clear();
    begin_ns = 0;
    next = 0;
  }

  bool count(std::size_t rank, std::size_t param) {
    if (at(rank, param) == GradState::kCounted) return false;
    at(rank, param) = GradState::kCounted;
    if (begin_ns == 0) begin_ns = now_ns();
    if (rank == 0) order.push_back(param);
    const std::size_t bucket = bucket_of[param];
    if (--missing[bucket] == 0) ready_ns[bucket] = now_ns();
    return true;
  }

  // Return true if the next bucket of the plan can be launched during backward. Never for the last:
  // wait() launches it after all checks, so that a failed step fails on all ranks.
  bool is_next_complete() const { return next + 1 < missing.size() && missing[next] == 0; }

  static std::int64_t now_ns() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }
};

// C callbacks by which the CPU engine's module reports computed gradients to the CUDA engine's.
// Passed in a Python capsule; called with the GIL held. note() returns false after a Python error.
struct ReadyHook {
  static constexpr const char* kCapsule = "pyringar.ready";
  void* self;
  void (*start_step)(void* self);
  bool (*note)(void* self, int bucket, int rank, bool is_new);
};

}  // namespace pyringar
