// wait: the only file in which a CPU thread sleeps until another thread writes a word.
// Floor     os: std and the operating system. Linux futexes; elsewhere, or with
//           PYRINGAR_NO_FUTEX, a table of condition variables that works for threads only.
// Units     Deadline is a point on the steady clock.
// Contract  Data written before set(n) is visible after wait_for_flag(n) returns. A flag has one
//           writer; values only grow (modulo 2^32).
// Tests     tests/cpp/pool_test.cpp, under ThreadSanitizer and with PYRINGAR_NO_FUTEX.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

namespace pyringar {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// The threads that may sleep on a word: of this process, or of all processes that map it.
enum class Scope { kThreads, kProcesses };

// Sleep while word == expected, at most until the deadline. May return early.
void os_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, Deadline deadline,
             Scope scope = Scope::kThreads);
inline constexpr int kWakeAll = 1 << 30;
void os_wake(const std::atomic<std::uint32_t>& word, int count, Scope scope = Scope::kThreads);

inline void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("isb" ::: "memory");
#endif
}

// A counter that one thread advances and other threads wait for. set() makes a system call only if
// a thread sleeps. Aligned to a cache line, so that waiting does not slow down adjacent data.
struct alignas(64) Flag {
  std::atomic<std::uint32_t> value{0};
  std::atomic<std::uint32_t> sleepers{0};

  void set(std::uint32_t n, int max_wake = kWakeAll, Scope scope = Scope::kThreads) {
    // Sequentially consistent here and in the waiter: the writer sees the sleeper, or the sleeper
    // sees the value.
    value.store(n, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) os_wake(value, max_wake, scope);
  }
};

inline constexpr Deadline kNoDeadline = Deadline::max();

// Poll with a few pauses, then yields, since the writer may need this core. Return flag >= wanted.
bool try_for_flag(const Flag& flag, std::uint32_t wanted);

// Yield at most num_yields times. If another thread computes on the core, a yield costs a time
// slice: after the first such yield give up, and set how many waits should skip yields.
bool yield_for_flag(const Flag& flag, std::uint32_t wanted, int num_yields,
                    int& waits_without_yields);

// Poll as try_for_flag() does, then sleep until flag >= wanted.
void wait_for_flag(Flag& flag, std::uint32_t wanted);

// Sleep, `nap` at a time, until flag >= wanted. Call give_up() after each nap; if it returns true,
// return false. give_up() may throw.
bool nap_for_flag(Flag& flag, std::uint32_t wanted, std::chrono::nanoseconds nap,
                  const std::function<bool()>& give_up, Scope scope = Scope::kThreads);

}  // namespace pyringar
