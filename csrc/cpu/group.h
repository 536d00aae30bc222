// group: the CPU ranks of one communicator, and how a collective runs on them, now or later.
//
// Units     bytes, nanoseconds. A Collective borrows the tensors' memory until its Work is done.
// Contract  Collectives of one group run one at a time, in the order in which they were asked for.
//           After a failed wait the group refuses everything with that reason. In a forked child
//           it refuses too. Waits call on_nap as os/call_lock does; in the destructor it must not
//           throw.
// Threads   any thread may call; run() and Work::wait() block, try_run() never does.
// Tests     tests/test_communicator.py, tests/cpp/stress.cpp
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

// In a forked child it must be leaked, not destroyed: what its threads held at the fork stays held.
class Group : public ForkGuard {
 public:
  // world_size 0: any number of ranks per call, fused only.
  Group(int world_size, std::chrono::nanoseconds timeout, OnNap on_nap = &ignore_naps);
  ~Group() { close(); }

  int world_size() const { return world_size_; }
  void run(const Collective& collective) {
    const CallLock::Held held = lock_calls();
    run_locked(collective, CallMode::kBlocking);
  }
  // Returns when all that was asked for before has run; throws where run() would refuse.
  void wait_for_earlier_calls() {
    const CallLock::Held held = lock_calls();
    check_usable();
    check_not_failed();
  }
  // False, and nothing done, when another collective is running or waiting to.
  bool try_run(const Collective& collective);
  // Later, or at once where that is best (cpu/fused.h) and nothing else runs or waits.
  std::shared_ptr<Work> submit(Collective collective);
  // Waits for everything submitted, then joins all threads; run() and submit() throw from then on.
  // Where on_nap ends the wait, what has not begun is refused too; close() may be called again.
  // False in a forked child: it is the parent's to close.
  bool close();
  GroupStats stats();
  void check_usable() const {
    check_not_forked();
    if (closed_.load(std::memory_order_acquire)) fail_closed();
  }
  // And after a failure, unless a collective runs just now: waits for nothing.
  void check();
  bool has_this_thread() const { return queue_.is_worker_thread(); }

  // For tests: the rank sleeps before its next ring, at most until end_delay().
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

  CallLock call_lock_;  // held while a collective runs; guards all below down to delay_
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<RankTeam> team_;
  std::unique_ptr<RingLinks> ring_;
  std::string failure_;
  ErrorKind failure_kind_ = ErrorKind::kState;
  int delayed_rank_ = -1;
  std::chrono::nanoseconds delay_{};
  std::binary_semaphore end_delay_{0};

  std::mutex stats_mutex_;  // never held while one waits
  GroupStats stats_;

  WorkQueue queue_{call_lock_};
  std::atomic<bool> closed_{false};
};

}  // namespace pyringar
