// stillness: for how long other ranks have stood still, as seen by one that waits for them.
//
// Units     nanoseconds.
// Contract  A rank stands still while its mark, a number that changes with all that it gets done,
//           stays the same. Time counts only while the waiting rank looks. It starts anew when that
//           rank has moved, since others may have waited for it, and for a rank that is ahead: see
//           excuse(). The last rank is found within the timeout and two naps.
// Threads   one thread at a time; any may set the timeout.
// Tests     tests/cpp/stillness_test.cpp, tests/test_deadlines.py
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "os/wait.h"

namespace pyringar {

class Stillness {
 public:
  Stillness(int world_size, std::chrono::nanoseconds timeout)
      : timeout_(timeout), seen_(static_cast<std::size_t>(world_size)) {}

  std::chrono::nanoseconds timeout() const { return timeout_.load(std::memory_order_relaxed); }
  // From any thread.
  void set_timeout(std::chrono::nanoseconds timeout) {
    timeout_.store(timeout, std::memory_order_relaxed);
  }
  // How long to sleep between two looks.
  std::chrono::nanoseconds nap() const {
    return std::clamp<std::chrono::nanoseconds>(timeout() / 4, std::chrono::milliseconds(1),
                                                std::chrono::milliseconds(50));
  }

  // All ranks begin anew at the next look.
  void forget() { has_looked_ = false; }

  // mark_of(rank): see above. own: the rank that looks.
  template <typename MarkOf>
  void look(int own, MarkOf&& mark_of, Clock::time_point now = Clock::now()) {
    // Who slept for much longer than a nap was stopped, and perhaps all were.
    const auto looked = has_looked_
                            ? std::min<std::chrono::nanoseconds>(now - last_look_, 2 * nap())
                            : std::chrono::nanoseconds(0);
    bool own_moved = !has_looked_;
    for (std::size_t rank = 0; rank < seen_.size(); ++rank) {
      Seen& seen = seen_[rank];
      const std::uint64_t mark = mark_of(static_cast<int>(rank));
      const bool moved = has_looked_ && mark != seen.mark;
      if (moved) seen.moved_at = now;
      if (moved && static_cast<int>(rank) == own) own_moved = true;
      seen.mark = mark;
      seen.still = moved ? std::chrono::nanoseconds(0) : seen.still + looked;
    }
    if (own_moved) {
      for (Seen& seen : seen_) seen.still = {};
    }
    has_looked_ = true;
    last_look_ = now;
  }

  // After a look that found this rank ahead of another: its time begins when that has caught up.
  void excuse(int rank) { seen_[static_cast<std::size_t>(rank)].still = {}; }

  std::chrono::nanoseconds still(int rank) const { return at(rank).still; }
  bool is_late(int rank) const { return still(rank) >= timeout(); }
  bool all_are_late() const {
    return std::all_of(seen_.begin(), seen_.end(),
                       [this](const Seen& seen) { return seen.still >= timeout(); });
  }
  // When a look found that the rank had moved; the clock's zero if none has.
  Clock::time_point moved_at(int rank) const { return at(rank).moved_at; }

 private:
  struct Seen {
    std::uint64_t mark = 0;
    std::chrono::nanoseconds still{};
    Clock::time_point moved_at{};
  };
  const Seen& at(int rank) const { return seen_[static_cast<std::size_t>(rank)]; }

  std::atomic<std::chrono::nanoseconds> timeout_;
  std::vector<Seen> seen_;
  bool has_looked_ = false;
  Clock::time_point last_look_{};
};

}  // namespace pyringar
