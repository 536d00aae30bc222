// group: one rank of a group of processes, and its calls, now or in the background.
//
// Units     bytes, nanoseconds. A call borrows the tensors' memory until it has run.
// Contract  All ranks make the same calls in the same order. A difference is found before data
//           moves, and raised on all ranks. A group that failed, and a forked child's, refuses all
//           calls. Waits call on_nap. An exception from it ends the wait and the group, and the
//           other ranks are told; in the destructor it must not throw. While on_nap runs in a wait,
//           calls and close() of that thread are refused (os/turn).
// Threads   any thread may call; calls run one at a time, in the order in which they came.
// Tests     tests/test_process_deaths.py, tests/cpp/process_test.cpp
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "os/shared_memory.h"
#include "os/turn.h"
#include "os/work_queue.h"
#include "process/call.h"
#include "process/death_notice.h"

namespace pyringar {

struct ProcessGroupOptions {
  std::chrono::nanoseconds timeout{};
  bool compares_shapes = true;  // or only numbers of elements, which correspond by index
  OnNap on_nap = &ignore_naps;
  void (*on_wait)() = &ignore_naps;  // before a wait that may take longer than some microseconds
  void (*on_announce)() = &ignore_naps;  // after a call is announced, before it writes
};

// Calls under way end first; or at once, with an error, here and on the other ranks.
enum class Leaving { kAfterCalls, kAborting };

using ProcessStats = CallStats<kNumProcessAlgorithms>;

class ProcessGroup : public ForkGuard {
 public:
  // memory: laid out or attached by its caller, for world_size ranks.
  ProcessGroup(SharedMemory memory, Segment segment, int rank, ProcessGroupOptions options);
  ~ProcessGroup() { close(); }

  int rank() const { return rank_; }
  int world_size() const { return segment_.world_size(); }
  const Segment& segment() const { return segment_; }

  std::vector<int> absent_ranks() const;
  void seal() { memory_.close_fd(); }

  const PeerWatch& watch() const { return watch_; }  // for what any thread may ask
  void wait_until_idle(const OnNap& on_nap) { queue_.wait_until_idle(on_nap); }
  void run(const Collective& call) {
    run_program([&](ProcessRank&) { return run_call(call, false); });
  }
  std::shared_ptr<Work> submit(Collective call);
  // The same for a program that moves the data by other means. False: the watch says why. What it
  // throws ends the group, and the others are told.
  using Program = std::function<bool(ProcessRank& self)>;
  void run_program(const Program& program) {
    const Turn::Held turn = take_turn();
    run_program_locked(program);
  }
  std::shared_ptr<Work> submit_program(Program program, std::shared_ptr<const Collective> call);
  // A step on this rank alone, after all that was submitted before and before what comes later.
  std::shared_ptr<Work> submit_step(std::function<void()> step);
  // Waits for calls that run; refuses all that come later. False in a forked child, and in the
  // thread of the background, which cannot wait for itself: there the rank leaves at once.
  bool end_calls(Leaving leaving);
  // The same, then leaves the group. Unless it was false: then the next close() does.
  bool close(Leaving leaving = Leaving::kAfterCalls);
  // Throws if the group has failed, or one of these ranks is gone or has left. Does not wait.
  void check_peers(const std::vector<int>& peers) const {
    check_usable();
    watch_.check_peers(peers);
  }
  // What this rank found by other means: the others hear it before they find this one gone.
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
  // Tells the others that this rank `how`, such as "has aborted the group", unless it has left
  // before; fails the call that runs, and refuses those that have not begun. From any thread.
  void leave_at_once(const std::string& how);
  bool has_this_thread() const { return queue_.is_mine(); }

  // For tests: stops before the given phase of the next call.
  void delay(Phase phase, std::chrono::nanoseconds time);

 private:
  std::string describe(const Collective& call, bool has_begun) const;
  std::shared_ptr<Work> enqueue(std::function<void()> job, Describe describe);
  bool run_call(const Collective& call, bool is_background);
  bool attempt(const Collective& call, bool is_background);
  void run_program_locked(const Program& program);
  Turn::Held take_turn();

  SharedMemory memory_;
  const Segment segment_;
  const int rank_;
  const bool compares_shapes_;
  const OnNap on_nap_;

  Turn turn_;  // held while a call runs; guards the two below
  PeerWatch watch_;
  const DeathNotice death_notice_{segment_, rank_};
  ProcessRank self_;

  std::mutex stats_mutex_;  // never held while one waits
  ProcessStats stats_;

  WorkQueue queue_{turn_};
  std::atomic<bool> closed_{false};
};

}  // namespace pyringar
