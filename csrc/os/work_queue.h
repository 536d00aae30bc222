// work_queue: one thread that runs jobs in the order in which they were submitted.
// Contract  A Work is complete after its job returned or threw. The first job starts the thread.
//           close() runs all jobs, then joins the thread. Waits call on_nap as os/call_lock does.
// Threads   Any thread may call. A job must not call submit() or close().
// Tests     tests/test_communicator.py, tests/cpp/pool_test.cpp
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "os/call_lock.h"
#include "os/process.h"

namespace pyringar {

// Describe a job, and which rank it waits for, in an error message. Any thread may call it.
using Describe = std::function<std::string(bool has_begun)>;

// The result of a submitted job. A forked child refuses a Work that was not done at the fork.
class Work {
 public:
  explicit Work(Describe describe = nullptr, std::function<void()> interrupt = nullptr)
      : describe_(std::move(describe)), interrupt_(std::move(interrupt)) {}

  bool is_completed() const;
  // Return false after the timeout; throw the error of the job.
  bool wait(std::chrono::nanoseconds timeout);
  std::string describe();
  // Called if a signal ended a wait for this Work: fails the group unless the job is done.
  void interrupt() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (interrupt_) interrupt_();
  }
  void begin() {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_begun_ = true;
  }
  std::exception_ptr exception() const { return is_completed() ? error_ : nullptr; }
  // Return when the job ended, on the steady clock; 0 until then.
  std::int64_t finished_ns() const { return is_completed() ? finished_ns_ : 0; }
  void complete(std::exception_ptr error);

 private:
  const ForkGuard process_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_begun_ = false;
  // describe_ and interrupt_ are null once the job is done: objects they use may be destroyed then.
  Describe describe_;
  std::function<void()> interrupt_;
  std::atomic<bool> done_{false};  // set after finished_ns_ and error_, which then stay constant
  std::int64_t finished_ns_ = 0;
  std::exception_ptr error_;
};

class WorkQueue {
 public:
  explicit WorkQueue(const CallLock& call_lock) : call_lock_(call_lock) {}
  ~WorkQueue() { close(&ignore_naps); }

  // Throw, without queueing the job, if the queue is closed or no thread can be started.
  std::shared_ptr<Work> submit(std::function<void()> job, Describe describe,
                               std::function<void()> interrupt = nullptr);
  // Return true on the queue's thread, which must not wait for the queue.
  bool is_worker_thread() const { return worker_.load() == std::this_thread::get_id(); }
  bool has_work() const { return num_waiting_.load(std::memory_order_acquire) > 0; }
  void wait_until_idle(const OnNap& on_nap);
  // If on_nap throws, submitted jobs still run, and new jobs are refused.
  void close(const OnNap& on_nap);

 private:
  struct Job {
    std::function<void()> run;
    std::shared_ptr<Work> work;
  };

  void run_jobs();

  const CallLock& call_lock_;
  std::mutex close_mutex_;  // held by the thread that joins thread_
  std::mutex mutex_;        // guards the members down to thread_
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool is_busy_ = false;  // true while a job runs
  bool is_closing_ = false;
  std::unique_ptr<std::thread> thread_;
  std::atomic<std::thread::id> worker_{};
  std::atomic<int> num_waiting_{0};  // number of jobs queued or running
};

}  // namespace pyringar
