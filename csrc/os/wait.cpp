// wait: futexes or condition variables, and the policy: pause, yield, sleep.
#include "os/wait.h"

#include <thread>

#include "core/ring_program.h"
#include "os/process.h"

#if defined(__linux__) && !defined(PYRINGAR_NO_FUTEX)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#else
#include <condition_variable>
#include <mutex>
#endif

namespace pyringar {

#if defined(__linux__) && !defined(PYRINGAR_NO_FUTEX)

void os_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, Deadline deadline,
             Scope scope) {
  timespec timeout;
  if (deadline != kNoDeadline) {
    const auto left = std::chrono::nanoseconds(deadline - Clock::now()).count();
    if (left <= 0) return;
    timeout.tv_sec = static_cast<time_t>(left / 1'000'000'000);
    timeout.tv_nsec = static_cast<long>(left % 1'000'000'000);
  }
  // The futex call returns at once if the word has already changed. Callers check that.
  syscall(SYS_futex, &word, scope == Scope::kThreads ? FUTEX_WAIT_PRIVATE : FUTEX_WAIT, expected,
          deadline != kNoDeadline ? &timeout : nullptr, nullptr, 0);
}

void os_wake(const std::atomic<std::uint32_t>& word, int count, Scope scope) {
  syscall(SYS_futex, &word, scope == Scope::kThreads ? FUTEX_WAKE_PRIVATE : FUTEX_WAKE, count,
          nullptr, nullptr, 0);
}

#else

namespace {

// A lock and a condition variable, shared by all words with one hash of their address.
struct ParkingLot {
  std::mutex mutex;
  std::condition_variable changed;
};

ParkingLot& lot_of(const void* address) {
  static ParkingLot lots[64];
  return lots[(reinterpret_cast<std::uintptr_t>(address) >> 6) % 64];
}

}  // namespace

void os_wait(const std::atomic<std::uint32_t>& word, std::uint32_t expected, Deadline deadline,
             Scope) {
  ParkingLot& lot = lot_of(&word);
  std::unique_lock<std::mutex> lock(lot.mutex);
  if (word.load(std::memory_order_seq_cst) != expected) return;
  if (deadline == kNoDeadline) {
    lot.changed.wait(lock);
  } else {
    lot.changed.wait_until(lock, deadline);
  }
}

void os_wake(const std::atomic<std::uint32_t>& word, int, Scope) {
  ParkingLot& lot = lot_of(&word);
  // The waiter checks the word under this lock, so it sees the new value or the notification.
  // Notify all: waiters of other words share the variable.
  const std::lock_guard<std::mutex> lock(lot.mutex);
  lot.changed.notify_all();
}

#endif

namespace {

constexpr int kPauses = 16;
constexpr int kYields = 500;
constexpr auto kLongYield = std::chrono::microseconds(200);
constexpr int kWaitsAfterLongYield = 64;
thread_local int waits_without_yields = 0;

// Counts this thread as a sleeper on a flag. A forked child does not change the count.
class Sleeper {
 public:
  explicit Sleeper(Flag& flag) : flag_(flag) {
    flag_.sleepers.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Sleeper() {
    if (!process_.forked()) flag_.sleepers.fetch_sub(1, std::memory_order_relaxed);
  }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  Flag& flag_;
  const ForkGuard process_;
};

}  // namespace

bool yield_for_flag(const Flag& flag, std::uint32_t wanted, int num_yields,
                    int& waits_without_yields) {
  Deadline before = Clock::now();
  for (int i = 0; i < num_yields; ++i) {
    std::this_thread::yield();
    if (reached(flag.value.load(std::memory_order_acquire), wanted)) return true;
    const Deadline after = Clock::now();
    if (after - before > kLongYield) {
      waits_without_yields = kWaitsAfterLongYield;
      return false;
    }
    before = after;
  }
  return false;
}

bool try_for_flag(const Flag& flag, std::uint32_t wanted) {
  for (int i = 0; i < kPauses; ++i) {
    if (reached(flag.value.load(std::memory_order_acquire), wanted)) return true;
    cpu_pause();
  }
  if (waits_without_yields == 0) {
    return yield_for_flag(flag, wanted, kYields, waits_without_yields);
  }
  --waits_without_yields;
  return false;
}

void wait_for_flag(Flag& flag, std::uint32_t wanted) {
  if (try_for_flag(flag, wanted)) return;
  const Sleeper sleeper(flag);
  while (true) {
    const std::uint32_t seen = flag.value.load(std::memory_order_seq_cst);
    if (reached(seen, wanted)) return;
    os_wait(flag.value, seen, kNoDeadline);
  }
}

bool nap_for_flag(Flag& flag, std::uint32_t wanted, std::chrono::nanoseconds nap,
                  const std::function<bool()>& give_up, Scope scope) {
  const Sleeper sleeper(flag);
  for (bool is_first = true;; is_first = false) {
    const std::uint32_t seen = flag.value.load(std::memory_order_seq_cst);
    if (reached(seen, wanted)) return true;
    if (!is_first && give_up()) return false;
    os_wait(flag.value, seen, Clock::now() + nap, scope);
  }
}

}  // namespace pyringar
