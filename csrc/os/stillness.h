// stillness: the time for which each rank has made no progress, as measured by a rank that waits.
// Units     nanoseconds.
// Contract  Each rank has a progress mark, a number that changes as it works. While the mark
//           is unchanged, the rank's time grows, but only between calls of look(). All times
//           restart when the calling rank progressed: the other ranks may have waited for it. The
//           slowest rank is late after the timeout and two naps at most.
// Threads   One thread at a time; any thread may set the timeout.
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
  void set_timeout(std::chrono::nanoseconds timeout) {
    timeout_.store(timeout, std::memory_order_relaxed);
  }
  // Return the time to sleep between two calls of look().
  std::chrono::nanoseconds nap() const {
    return std::clamp<std::chrono::nanoseconds>(timeout() / 4, std::chrono::milliseconds(1),
                                                std::chrono::milliseconds(50));
  }

  // Restart the time of all ranks at the next look().
  void forget() { has_looked_ = false; }

  // Read the progress mark of each rank and update its time. `own` is the calling rank.
  template <typename MarkOf>
  void look(int own, MarkOf&& mark_of, Clock::time_point now = Clock::now()) {
    // After a sleep much longer than a nap, the machine was stopped: count two naps at most.
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

  // Restart the time of a rank that waits for a slower rank.
  void excuse(int rank) { seen_[static_cast<std::size_t>(rank)].still = {}; }

  std::chrono::nanoseconds still(int rank) const { return at(rank).still; }
  bool is_late(int rank) const { return still(rank) >= timeout(); }
  bool all_are_late() const {
    return std::all_of(seen_.begin(), seen_.end(),
                       [this](const Seen& seen) { return seen.still >= timeout(); });
  }
  // Return when look() last saw progress of the rank; the clock's zero if it never saw any.
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
