// thread_pool: helper threads that may join a loop of the caller.
// Contract  run(work) calls work(0) on the caller's thread. It calls work(i), i > 0, on each helper
//           that joins before work(0) returns, and never waits for a helper that did not join. It
//           returns after all calls, and throws the first exception. work() divides the items.
// Threads   One run() at a time per pool: its owner holds a lock. Helpers start at first use and
//           sleep between jobs; the destructor joins them.
// Tests     tests/cpp/pool_test.cpp, under ThreadSanitizer
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
  // kByCores: one helper per core of the caller, except the caller's current core.
  static constexpr int kByCores = -1;
  explicit ThreadPool(int num_helpers = kByCores)
      : follows_cores_(num_helpers == kByCores), num_helpers_(follows_cores_ ? 0 : num_helpers) {}
  ~ThreadPool();

  int count_helpers();
  // Return true if helpers sleep and jobs are rare: waking helpers then pays for large jobs only.
  bool is_cold();
  // Run a job. Helpers that join: at most max_helpers, and at most the result of count_helpers().
  void run(const std::function<void(int thread)>& work, std::size_t max_helpers = SIZE_MAX);

 private:
  void start_helpers();
  void help(int thread, std::uint32_t seen);
  void attempt_work(int thread) noexcept;
  bool join_open_job();

  // state_ is the number of helpers inside the job, with bit kClosed if no more may join.
  static constexpr std::uint32_t kClosed = 1u << 31;
  const bool follows_cores_;
  int num_helpers_;                   // result of the last count_helpers()
  std::vector<std::thread> helpers_;  // all end in the destructor
  Affinity affinity_;
  Deadline last_asked_{};
  const std::function<void(int)>* work_ = nullptr;  // written by run() while the job is closed
  std::mutex error_mutex_;                          // guards error_
  std::exception_ptr error_;
  std::atomic<std::uint32_t> most_inside_{0};
  alignas(64) std::atomic<std::uint32_t> state_{kClosed};
  Flag generation_;  // number of jobs started; set by the caller of run()
  Flag left_;        // number of jobs that helpers finished; set by a job's last helper
  std::atomic<std::uint32_t> stop_{0};
};

}  // namespace pyringar
