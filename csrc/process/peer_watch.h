// peer_watch: the waits of a rank for ranks in other processes, and the rank that a timeout names.
// Units     nanoseconds.
// Contract  A wait polls (pauses if each rank has a core, then yields), then sleeps. It fails if
//           the slowest rank made no progress for the timeout (os/stillness.h), the peer exited, a
//           rank published a failure, or on_nap() throws. All ranks report the same failure: it
//           names a rank, its process, host and last call.
// Threads   One thread at a time, except where a method says otherwise.
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

// Publish a failure to all ranks; later failures of the group are ignored.
void tell_failure(const Segment& segment, ErrorKind kind, const std::string& text);

class PeerWatch {
 public:
  // Polls before a rank yields its core, if ranks or threads outnumber cores.
  static constexpr int kPausesCrowded = 5;
  // Polls before on_wait is called: some microseconds.
  static constexpr int kPausesAtOnce = 100;

  PeerWatch(const Segment& segment, int rank, std::chrono::nanoseconds timeout);

  // on_nap is called about ten times a second while a wait sleeps; its exception ends the wait.
  void set_on_nap(std::function<void()> on_nap) { on_nap_ = std::move(on_nap); }
  // on_wait is called before a wait that exceeds kPausesAtOnce polls.
  void set_on_wait(void (*on_wait)()) { on_wait_ = on_wait; }
  void before_wait() const { on_wait_(); }
  void set_timeout(std::chrono::nanoseconds timeout) { stillness_.set_timeout(timeout); }

  // is_background: other threads of this process need the core, so wait with few polls.
  void begin_call(bool is_background);

  void progressed() {
    std::atomic<std::uint32_t>& count = segment_.line(rank_).progress;
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  bool wait(Flag& flag, std::uint32_t wanted, int peer, const char* what) {
    return pause_for(flag.value, wanted) || wait_slowly(flag, wanted, peer, what);
  }
  // The two halves of wait(). pause_for() may poll a number that is written before the flag.
  bool pause_for(const std::atomic<std::uint32_t>& number, std::uint32_t wanted) const {
    return pause_for(number, wanted, std::min(num_pauses(), kPausesAtOnce));
  }
  bool wait_slowly(Flag& flag, std::uint32_t wanted, int peer, const char* what);

  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  ErrorKind kind() const { return kind_; }
  // Store the failure for later calls and publish it to all ranks. Ignored in a forked child.
  void report(ErrorKind kind, const std::string& text);
  // Adopt the published failure of any rank; return true if there is one.
  bool adopt_shared_failure();
  [[noreturn]] void raise() const { throw Error(kind_, failure_); }
  // Return the published failure, or "". Any thread may call.
  std::string shared_failure() const;
  // Throw if the group has failed or one of these ranks has exited. Any thread may call.
  void check_peers(const std::vector<int>& peers) const;
  // Return a number that changes while any rank works.
  std::uint64_t progress() const;
  // Return the number of the rank in messages.
  int global_rank(int rank) const { return segment_.line(rank).global_rank; }
  // Return "rank 1 (process 4711 on host)" with the global rank.
  std::string name_of(int rank) const;
  std::string last_call_of(int rank) const;
  bool has_left(int rank) const { return segment_.line(rank).state.load() == RankState::kLeft; }
  const char* how_gone(int rank) const;  // "has left the group", "is gone", or null if alive
  std::chrono::nanoseconds timeout() const { return stillness_.timeout(); }
  // Return the rank that this rank waits for and the reason, or "". Any thread may call.
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
  // Return a rank that died, else a rank that closed, else -1: a rank may close after a death.
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
  bool has_counted_cores_ = false;
  int ranks_per_core_ = std::numeric_limits<int>::max();  // set by count_cores()
  bool has_core_per_rank_ = false;
  int waits_without_yields_ = 0;
  bool is_background_ = false;
  bool peers_have_come_ = false;  // set in the first wait of a background call
  Stillness stillness_;
  std::atomic<int> awaited_peer_{-1};
  std::atomic<const char*> awaited_what_{""};
  std::function<void()> on_nap_;
  void (*on_wait_)() = [] {};
  ErrorKind kind_ = ErrorKind::kState;
  std::string failure_;
};

}  // namespace pyringar
