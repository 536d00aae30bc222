// peer_watch: how a rank waits for other processes, and whom it blames.
//
// Floor     cpu
// Units     nanoseconds.
// Contract  A wait tries a while (pauses where every rank has a core, then yields), then sleeps. It
//           ends at the deadline, or when the peer is gone, or when some rank has failed and said
//           so, or when on_nap() wants it to; failed() is set then, and what the caller and all
//           other ranks get to read names the rank, its process, its host and its last call.
//           The deadline counts from the first time that a call sleeps.
// Threads   one thread at a time.
// Tests     tests/test_process_faults.py, tests/cpp/process_test.cpp
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "core/error.h"
#include "cpu/os_wait.h"
#include "cpu/process_segment.h"

namespace pyringar {

// The failure that all ranks share: the first counts.
void tell_failure(const Segment& segment, ErrorKind kind, const std::string& text);

class PeerWatch {
 public:
  // Looks at a flag before a rank gives its core away, where ranks or threads outnumber cores.
  static constexpr int kPausesCrowded = 50;

  PeerWatch(const Segment& segment, int rank, std::chrono::nanoseconds timeout);

  // Called while a wait sleeps, some ten times a second; an exception from it ends the wait.
  void set_on_nap(std::function<void()> on_nap) { on_nap_ = std::move(on_nap); }
  // Any thread may set it, for the waits that begin later.
  std::chrono::nanoseconds timeout() const { return timeout_.load(std::memory_order_relaxed); }
  void set_timeout(std::chrono::nanoseconds timeout) {
    timeout_.store(timeout, std::memory_order_relaxed);
  }

  // A new deadline. In the background: beside threads of its own process that want the core.
  void begin_call(bool is_background);

  bool wait(Flag& flag, std::uint32_t wanted, int peer, const char* what) {
    const int num_pauses = is_background_ ? kPausesCrowded : num_pauses_;
    for (int i = 0; i < num_pauses; ++i) {
      if (reached(flag.value.load(std::memory_order_acquire), wanted)) return true;
      cpu_pause();
    }
    return wait_slowly(flag, wanted, peer, what);
  }

  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  // For this rank to refuse calls with, and for the others to find.
  void report(ErrorKind kind, const std::string& text);
  // Whether some rank has failed before.
  bool adopt_shared_failure();
  [[noreturn]] void raise() const;
  // Throws if the group has failed or one of these ranks is gone; any thread may call.
  void check_peers(const std::vector<int>& peers) const;
  // "rank 1 (process 4711 on host)"
  std::string name_of(int rank) const;
  std::string last_call_of(int rank) const;

 private:
  bool wait_slowly(Flag& flag, std::uint32_t wanted, int peer, const char* what);
  bool yield_until(const Flag& flag, std::uint32_t wanted);
  void keep_apart();
  bool give_up(const Flag& flag, std::uint32_t wanted, int peer, const char* what);
  int most_behind(int suspect) const;
  const char* how_gone(int rank) const;  // null: it is there
  std::string waited_for(int peer, const char* what) const;

  const Segment& segment_;
  const int rank_;
  std::atomic<std::chrono::nanoseconds> timeout_;
  const int num_pauses_;
  const int num_yields_;
  const bool has_core_per_rank_;
  int waits_without_yields_ = 0;
  bool is_background_ = false;
  bool peers_have_come_ = false;  // to this call
  bool has_deadline_ = false;
  Deadline deadline_{};
  std::function<void()> on_nap_;
  ErrorKind kind_ = ErrorKind::kState;
  std::string failure_;
};

}  // namespace pyringar
