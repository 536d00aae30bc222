// thread_pool: helpers that may join the caller's loop; it never waits for one that has not joined.
//
// Contract  run(work) calls work(0) on the caller's thread and work(i), i > 0, on every helper that
//           joins before work(0) has returned. It returns when all calls have, and throws the first
//           exception. work() shares out its own items.
// Threads   one run() at a time per pool (its owner holds a lock). Helpers start at first use,
//           sleep between jobs, and are joined by the destructor.
// Tests     tests/cpp/stress.cpp, under ThreadSanitizer
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "os/thread.h"
#include "os/wait.h"

namespace pyringar {

class ThreadPool {
 public:
  // num_helpers; kByCores: for each job one per core that the caller may use, except its own.
  static constexpr int kByCores = -1;
  explicit ThreadPool(int num_helpers = kByCores)
      : follows_cores_(num_helpers == kByCores), num_helpers_(follows_cores_ ? 0 : num_helpers) {}
  ~ThreadPool();

  int count_helpers();
  // Whether helpers sleep, and jobs are rare: then waking them pays for large jobs only.
  bool is_cold();
  // At most max_helpers join, and as many as the last look found.
  void run(const std::function<void(int thread)>& work, std::size_t max_helpers = SIZE_MAX);

 private:
  void start_helpers();
  void help(int thread, std::uint32_t seen);
  void attempt_work(int thread) noexcept;
  bool join_open_job();

  // state_: kClosed, or the number of helpers inside the open job.
  static constexpr std::uint32_t kClosed = 1u << 31;
  const bool follows_cores_;
  int num_helpers_;                   // of the job at hand, at most
  std::vector<std::thread> helpers_;  // as many as any job had
  Affinity affinity_;
  Deadline last_asked_{};
  const std::function<void(int)>* work_ = nullptr;  // written while closed, read by who joined
  std::mutex error_mutex_;                          // taken by who fails
  std::exception_ptr error_;
  std::atomic<std::uint32_t> most_inside_{0};
  alignas(64) std::atomic<std::uint32_t> state_{kClosed};
  Flag generation_;  // one tick per job
  Flag left_;        // one tick per helper that was the last to leave a closed job
  std::atomic<std::uint32_t> stop_{0};
};

}  // namespace pyringar
