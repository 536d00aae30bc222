// group: the CPU ranks of one communicator. It runs collectives, blocking or in the background.
// Units     bytes, nanoseconds. A Collective borrows the tensors' memory until its Work is done.
// Contract  Collectives run one at a time, in the order of the calls. After a failed wait the group
//           refuses all calls with that reason. A forked child refuses all calls. Waits call on_nap
//           as os/call_lock does; in the destructor on_nap must not throw.
// Threads   Any thread may call. run() and Work::wait() block, try_run() does not.
// Tests     tests/test_communicator.py, tests/cpp/group_test.cpp
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <semaphore>
#include <string>

#include "core/collective.h"
#include "cpu/fused.h"
#include "cpu/ring.h"
#include "os/call_lock.h"
#include "os/process.h"
#include "os/work_queue.h"

namespace pyringar {

// The CPU ranks of one communicator. A forked child must leak a Group, as its locks may be held.
class Group : public ForkGuard {
 public:
  // world_size 0: calls may have any number of ranks, and use `fused` only.
  Group(int world_size, std::chrono::nanoseconds timeout, OnNap on_nap = &ignore_naps);
  ~Group() { close(); }

  int world_size() const { return world_size_; }
  void run(const Collective& collective) {
    const CallLock::Held held = lock_calls();
    run_locked(collective, CallMode::kBlocking);
  }
  // Wait until all earlier calls have run; throw if the group is closed or has failed.
  void wait_for_earlier_calls() {
    const CallLock::Held held = lock_calls();
    check_usable();
    check_not_failed();
  }
  // Return false, without running, if another collective runs or waits.
  bool try_run(const Collective& collective);
  // Run in the background, or at once if the call is small and no other call runs or waits.
  std::shared_ptr<Work> submit(Collective collective);
  // Wait for submitted calls, then join all threads; later calls throw. If on_nap ends the wait,
  // calls that have not begun are refused, and close() may be called again. Returns false in a
  // forked child.
  bool close();
  GroupStats stats();
  void check_usable() const {
    check_not_forked();
    if (closed_.load(std::memory_order_acquire)) fail_closed();
  }
  // Throw if the group is closed or forked; if no collective runs, also if it failed. No wait.
  void check();
  bool has_this_thread() const { return queue_.is_worker_thread(); }

  // For tests: make a rank sleep before its next ring, at most until end_delay().
  void delay_rank(int rank, std::chrono::nanoseconds delay);
  void end_delay() { end_delay_.release(); }

 private:
  void check_not_failed() const {
    if (!failure_.empty()) fail_after(failure_kind_, failure_);
  }
  CallLock::Held lock_calls();
  std::shared_ptr<Work> run_at_once(const Collective& collective);
  void run_locked(const Collective& collective, CallMode mode);
  void run_ring(const Collective& collective, CallMode mode);

  const int world_size_;
  const std::chrono::nanoseconds timeout_;
  const OnNap on_nap_;

  CallLock call_lock_;  // held while a collective runs; guards the members down to delay_
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<RankTeam> team_;
  std::unique_ptr<RingLinks> ring_;
  std::string failure_;
  ErrorKind failure_kind_ = ErrorKind::kState;
  int delayed_rank_ = -1;
  std::chrono::nanoseconds delay_{};
  std::binary_semaphore end_delay_{0};

  std::mutex stats_mutex_;  // guards stats_; never held during a wait
  GroupStats stats_;

  WorkQueue queue_{call_lock_};
  std::atomic<bool> closed_{false};
};

}  // namespace pyringar
