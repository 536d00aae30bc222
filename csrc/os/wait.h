// wait: the one place where a CPU thread sleeps for another, and how long it tries before.
//
// Floor     os: std and the operating system. Linux futexes; elsewhere (or with
//           PYRINGAR_NO_FUTEX) a small table of condition variables, for threads only.
// Units     Deadline is a point on the steady clock.
// Contract  Flag: whatever was written before set(n) is visible after wait_for_flag(n) returned
//           true. One writer per flag; values only grow (modulo 2^32).
// Threads   any number of waiters per flag.
// Tests     tests/cpp/stress.cpp, under ThreadSanitizer and with PYRINGAR_NO_FUTEX.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

namespace pyringar {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Who may sleep on a word: the threads of this process, or of all that map its memory.
enum class Scope { kThreads, kProcesses };

// Sleeps while word == expected, at the longest until the deadline; may wake early.
void os_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, Deadline deadline,
             Scope scope = Scope::kThreads);
// Wakes at most `count` sleepers, or all of them.
inline constexpr int kWakeAll = 1 << 30;
void os_wake(const std::atomic<std::uint32_t>& word, int count, Scope scope = Scope::kThreads);

// A moment for the core's other thread.
inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("isb" ::: "memory");
#endif
}

// A counter that one thread advances and others wait for. The writer pays for a system call only
// when somebody sleeps. On lines of its own, so that waiting does not slow the neighbours down.
struct alignas(64) Flag {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};

  void set(std::uint32_t n, int max_wake = kWakeAll, Scope scope = Scope::kThreads) {
    // Sequentially consistent, as the waiter's are: one of the two sees the other.
    value.store(n, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) os_wake(value, max_wake, scope);
  }
};

inline constexpr Deadline kNoDeadline = Deadline::max();

// A few pauses, then yields: the other rank may need this core. Whether flag >= wanted by then.
bool try_for_flag(const Flag& flag, std::uint32_t wanted);

// Yields the core so often at most. CallMode a thread that computes, a yield gives away a whole
// time slice: the first that does ends this, and sets how many waits from now on sleep at once.
bool yield_for_flag(const Flag& flag, std::uint32_t wanted, int num_yields,
                    int& waits_without_yields);

// The same, then sleeps until it is.
void wait_for_flag(Flag& flag, std::uint32_t wanted);

// Sleeps, `nap` at a time, until flag >= wanted. False if give_up(), called after each nap, is
// true; it may throw.
bool nap_for_flag(Flag& flag, std::uint32_t wanted, std::chrono::nanoseconds nap,
                  const std::function<bool()>& give_up, Scope scope = Scope::kThreads);

}  // namespace pyringar
