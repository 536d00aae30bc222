// process_group: one rank of a group of processes. It runs calls, blocking or in the background.
// Units     bytes, nanoseconds. A call borrows the tensors' memory until it has run.
// Contract  All ranks make the same calls in the same order. All ranks raise if calls differ,
//           before data moves. A failed group, and a forked child, refuses all calls. Waits call
//           on_nap; an exception from it fails the group on all ranks. In the destructor it must
//           not throw. on_nap must not make calls or close() the group (os/call_lock).
// Threads   Any thread may call. Calls run one at a time, in the order in which they came.
// Tests     tests/test_process_deaths.py, tests/cpp/process_test.cpp
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "os/call_lock.h"
#include "os/shared_memory.h"
#include "os/work_queue.h"
#include "process/death_notice.h"
#include "process/process_call.h"

namespace pyringar {

struct ProcessGroupOptions {
  std::chrono::nanoseconds timeout{};
  bool compares_shapes = true;  // false: compare numbers of elements only
  OnNap on_nap = &ignore_naps;
  void (*on_wait)() = &ignore_naps;      // called before waits that may be long
  void (*on_announce)() = &ignore_naps;  // called after an announcement, before tensors are written
};

// kAfterCalls: close after running calls. kAborting: fail running calls, also on other ranks.
enum class CloseMode { kAfterCalls, kAborting };

using ProcessStats = CallStats<kNumProcessAlgorithms>;

class ProcessGroup : public ForkGuard {
 public:
  // segment: laid out or attached in `memory` by the caller.
  ProcessGroup(SharedMemory memory, Segment segment, int rank, ProcessGroupOptions options);
  ~ProcessGroup() { close(); }

  int rank() const { return rank_; }
  int world_size() const { return segment_.world_size(); }
  const Segment& segment() const { return segment_; }

  std::vector<int> absent_ranks() const;
  void seal() { memory_.close_fd(); }

  const PeerWatch& watch() const { return watch_; }  // call only methods that any thread may call
  void wait_until_idle(const OnNap& on_nap) { queue_.wait_until_idle(on_nap); }
  void run(const Collective& call) {
    run_program([&](ProcessRank&) { return run_call(call, false); });
  }
  std::shared_ptr<Work> submit(Collective call);
  // Runs a call by other code than run(). A Program returns false if a wait of the watch failed. If
  // it throws, the group fails on all ranks.
  using Program = std::function<bool(ProcessRank& self)>;
  void run_program(const Program& program) {
    const CallLock::Held held = lock_calls();
    run_program_locked(program);
  }
  std::shared_ptr<Work> submit_program(Program program, std::shared_ptr<const Collective> call);
  std::shared_ptr<Work> submit_step(std::function<void()> step);
  // Wait for running calls, and refuse later calls. Return false in a forked child, and on the
  // queue's thread, which cannot wait for itself: there the group is aborted.
  bool end_calls(CloseMode mode);
  // Call end_calls(); if it returns true, mark this rank as closed for the other ranks.
  bool close(CloseMode mode = CloseMode::kAfterCalls);
  // Throw if the group has failed, or one of these ranks has died or closed. Does not wait.
  void check_peers(const std::vector<int>& peers) const {
    check_usable();
    watch_.check_peers(peers);
  }
  // Publish a failure that this rank found outside the engine, before other ranks see it exit.
  void tell(ErrorKind kind, const std::string& text) const {
    check_not_forked();
    if (!closed_.load(std::memory_order_acquire)) tell_failure(segment_, kind, text);
  }
  std::uint64_t progress() const {
    check_not_forked();
    return watch_.progress();
  }
  void set_timeout(std::chrono::nanoseconds timeout) { watch_.set_timeout(timeout); }
  bool compares_shapes() const { return compares_shapes_; }
  ProcessStats stats();
  ProcessPlan plan(std::size_t bytes) const { return plan_all_reduce(bytes, segment_); }
  void check_usable() const {
    check_not_forked();
    if (closed_.load(std::memory_order_acquire)) fail_closed(watch_.shared_failure());
  }
  // Fail the group on all ranks unless this rank has closed. `how` completes the sentence "rank r
  // ...", such as "has aborted the group". Queued calls are refused. Any thread may call.
  void abort(const std::string& how);
  bool has_this_thread() const { return queue_.is_worker_thread(); }

  void delay(Phase phase, std::chrono::nanoseconds time);

 private:
  std::string describe(const Collective& call, bool has_begun) const;
  std::shared_ptr<Work> enqueue(std::function<void()> job, Describe describe);
  bool run_call(const Collective& call, bool is_background);
  bool attempt(const Collective& call, bool is_background);
  void run_program_locked(const Program& program);
  CallLock::Held lock_calls();

  SharedMemory memory_;
  const Segment segment_;
  const int rank_;
  const bool compares_shapes_;
  const OnNap on_nap_;

  CallLock call_lock_;  // held while a call runs; guards watch_ and self_
  PeerWatch watch_;
  const DeathNotice death_notice_{segment_, rank_};
  ProcessRank self_;

  std::mutex stats_mutex_;  // guards stats_; never held during a wait
  ProcessStats stats_;

  WorkQueue queue_{call_lock_};
  std::atomic<bool> closed_{false};
};

}  // namespace pyringar
