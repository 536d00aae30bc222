// watch: waits of a rank for other processes, with deadlines, and which rank a timeout names.
//
// Units     nanoseconds.
// Contract  A wait tries a while (pauses where every rank has a core, then yields), then sleeps. It
//           fails when the rank that is furthest behind has stood still for the timeout (see
//           os/stillness.h), the peer is gone, some rank has reported a failure, or on_nap()
//           throws. All ranks read one failure: it names a rank, its process, host and last call.
// Threads   one thread at a time.
// Tests     tests/test_process_deaths.py, tests/cpp/process_test.cpp
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "core/error.h"
#include "os/process.h"
#include "os/stillness.h"
#include "os/wait.h"
#include "process/segment.h"

namespace pyringar {

// The failure that all ranks share: the first counts.
void tell_failure(const Segment& segment, ErrorKind kind, const std::string& text);

class PeerWatch {
 public:
  // Looks at a flag before a rank gives its core away, where ranks or threads outnumber cores.
  static constexpr int kPausesCrowded = 5;
  // Those that on_wait is not worth: some microseconds.
  static constexpr int kPausesAtOnce = 100;

  PeerWatch(const Segment& segment, int rank, std::chrono::nanoseconds timeout);

  // Called while a wait sleeps, some ten times a second; an exception from it ends the wait.
  void set_on_nap(std::function<void()> on_nap) { on_nap_ = std::move(on_nap); }
  // Called before what may take longer than kPausesAtOnce.
  void set_on_wait(void (*on_wait)()) { on_wait_ = on_wait; }
  void before_wait() const { on_wait_(); }
  // Any thread may set it.
  void set_timeout(std::chrono::nanoseconds timeout) { stillness_.set_timeout(timeout); }

  // In the background: beside threads of its own process that want the core.
  void begin_call(bool is_background);

  // Says that this rank is under way, between two counters.
  void progressed() {
    std::atomic<std::uint32_t>& count = segment_.line(rank_).progress;
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  bool wait(Flag& flag, std::uint32_t wanted, int peer, const char* what) {
    return pause_for(flag.value, wanted) || wait_slowly(flag, wanted, peer, what);
  }
  // Its two halves: a number that is written before the flag may be looked at first.
  bool pause_for(const std::atomic<std::uint32_t>& number, std::uint32_t wanted) const {
    return pause_for(number, wanted, std::min(num_pauses(), kPausesAtOnce));
  }
  bool wait_slowly(Flag& flag, std::uint32_t wanted, int peer, const char* what);

  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  ErrorKind kind() const { return kind_; }
  // For this rank to refuse calls with, and for the others to find. A forked child is no rank.
  void report(ErrorKind kind, const std::string& text);
  // Whether some rank has failed before.
  bool adopt_shared_failure();
  [[noreturn]] void raise() const { throw Error(kind_, failure_); }
  // What ended the group, from any thread; "" while it goes on.
  std::string shared_failure() const;
  // Throws if the group has failed or one of these ranks is gone; any thread may call.
  void check_peers(const std::vector<int>& peers) const;
  // Changes while any rank gets something done.
  std::uint64_t progress() const;
  // "rank 1 (process 4711 on host)"
  std::string name_of(int rank) const;
  std::string last_call_of(int rank) const;
  bool has_left(int rank) const { return segment_.line(rank).state.load() == RankState::kLeft; }
  const char* how_gone(int rank) const;  // null: it is there
  std::chrono::nanoseconds timeout() const { return stillness_.timeout(); }
  // Whom this rank waits for, and to do what; "" if for nobody. From any thread.
  std::string awaited() const;

 private:
  int num_pauses() const { return is_background_ ? kPausesCrowded : num_pauses_; }
  static bool pause_for(const std::atomic<std::uint32_t>& number, std::uint32_t wanted,
                        int num_pauses) {
    for (int i = 0; i < num_pauses; ++i) {
      if (reached(number.load(std::memory_order_acquire), wanted)) return true;
      cpu_pause();
    }
    return false;
  }
  void keep_apart();
  void count_cores();
  bool give_up(const Flag& flag, std::uint32_t wanted, int peer, const char* what);
  bool is_lost(const Flag& flag, std::uint32_t wanted, int peer, const char* what);
  bool is_late(int peer, const char* what);
  // Who died before who has left, perhaps because of that; -1: all are there.
  int first_gone(const std::vector<int>& ranks) const;
  std::uint64_t mark_of(int rank) const;
  std::int32_t lead(int rank, int other) const {
    return lead_of(segment_.line(rank), segment_.line(other));
  }
  int most_behind(int suspect) const;
  std::string last_heard_of(int rank) const;
  std::string waited_for(int peer, const char* what) const;
  const CallRecord& last_call(int rank) const {
    const auto& [even, odd] = segment_.line(rank).calls;
    return even.sequence > odd.sequence ? even : odd;
  }

  const Segment& segment_;
  const int rank_;
  const ForkGuard process_;
  int num_pauses_ = kPausesCrowded;
  bool has_counted_cores_ = false;                        // of all ranks
  int ranks_per_core_ = std::numeric_limits<int>::max();  // not counted yet: any number
  bool has_core_per_rank_ = false;
  int waits_without_yields_ = 0;
  bool is_background_ = false;
  bool peers_have_come_ = false;  // to this call
  Stillness stillness_;
  std::atomic<int> awaited_peer_{-1};
  std::atomic<const char*> awaited_what_{""};
  std::function<void()> on_nap_;
  void (*on_wait_)() = [] {};
  ErrorKind kind_ = ErrorKind::kState;
  std::string failure_;
};

}  // namespace pyringar
