// step: the buckets of parameters, the content of each gradient, and the complete buckets.
// Units     nanoseconds on the steady clock; 0: not yet.
// Contract  count() is called for each accumulated gradient. A bucket is complete when all its
//           parameters are counted on all ranks.
// Threads   One call at a time: the owner holds the GIL.
// Tests     tests/test_bucketing.py, tests/test_bucketing_sums.py
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace pyringar {

// Assign parameters to buckets, in the given order; the result is equal on all ranks. A bucket
// holds one kind and closes when it reaches its cap. Only the first bucket uses first_cap_bytes.
// Buckets are in the order in which they close.
using BucketItem = std::pair<std::size_t, int>;  // bytes and kind (a dtype)
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
  std::vector<Open> open;  // one per kind, in the order of first parameters
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
  kUnchanged,  // no backward pass has added to it since the last reduction
  kStaleSum,   // unchanged, and rank 0 keeps the sum: this rank clears it before it accumulates
  kUncounted,  // passes without count() have added to it
  kCounted,    // count() was called in this step
};

struct Step {
  const std::size_t world_size;  // ranks of this process
  const std::size_t num_params;
  const std::size_t first_summed;  // first rank that clears a sum before it accumulates
  std::vector<GradState> held =
      std::vector<GradState>(world_size * num_params);  // by rank and parameter
  std::vector<std::size_t> bucket_of = std::vector<std::size_t>(num_params);
  std::vector<std::size_t> missing = {};  // by bucket: gradients not counted yet
  std::vector<std::int64_t> ready_ns = {};
  std::vector<std::int64_t> launched_ns = {};
  std::vector<std::size_t> order = {};  // rank 0's parameters in the order of their gradients
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

  // Whether the next bucket of the plan can be launched during backward. wait() launches the last
  // bucket after all checks, so no rank ends a step that fails on another rank.
  bool is_next_complete() const { return next + 1 < missing.size() && missing[next] == 0; }

  static std::int64_t now_ns() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }
};

// C callbacks in a Python capsule, called with the GIL held: the module of the CPU engine reports
// gradients to the module of the CUDA engine. note() returns false if it set a Python error.
struct ReadyHook {
  static constexpr const char* kCapsule = "pyringar.ready";
  void* self;
  void (*start_step)(void* self);
  bool (*note)(void* self, int bucket, int rank, bool is_new);
};

}  // namespace pyringar
