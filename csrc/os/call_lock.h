// call_lock: the lock under which the calls of a group run one at a time.
// Contract  acquire() returns when this thread holds the lock. While it waits it calls on_nap 20
//           times a second; an exception from on_nap ends the wait. It throws kState if this thread
//           holds the lock already: a signal handler that ran in on_nap made another call.
// Tests     tests/test_signals.py, tests/cpp/group_test.cpp
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "os/wait.h"

namespace pyringar {

// Called during waits; throws to end the wait, for instance after a signal.
using OnNap = std::function<void()>;
inline constexpr std::chrono::milliseconds kNapInterval{50};
inline void ignore_naps() {}

class CallLock {
 public:
  using Held = std::unique_lock<CallLock>;

  bool is_held_by_caller() const {
    return owner_.load(std::memory_order_relaxed) == std::this_thread::get_id();
  }
  bool try_lock() {
    std::uint32_t free = kFree;
    if (!state_.compare_exchange_strong(free, kHeld, std::memory_order_acquire)) return false;
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    return true;
  }
  void unlock() {
    owner_.store({}, std::memory_order_relaxed);
    if (state_.exchange(kFree, std::memory_order_release) == kContended) os_wake(state_, 1);
  }
  Held acquire(const OnNap& on_nap) {
    check_not_held_by_caller();
    if (!try_lock()) wait(on_nap);
    return Held(*this, std::adopt_lock);
  }
  void check_not_held_by_caller() const {
    if (!is_held_by_caller()) return;
    fail(ErrorKind::kState,
         "a signal handler cannot use this communicator while the call that it interrupted waits; "
         "raise an exception from the handler, which ends the call");
  }

 private:
  static constexpr std::uint32_t kFree = 0;
  static constexpr std::uint32_t kHeld = 1;
  static constexpr std::uint32_t kContended = 2;  // held, and a thread may sleep in wait()

  void wait(const OnNap& on_nap) {
    while (state_.exchange(kContended, std::memory_order_acquire) != kFree) {
      os_wait(state_, kContended, Clock::now() + kNapInterval);
      on_nap();
    }
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }

  std::atomic<std::uint32_t> state_{kFree};
  std::atomic<std::thread::id> owner_{};
};

}  // namespace pyringar
