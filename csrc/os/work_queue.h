// work_queue: one thread that runs what it is given, in the order in which it was given.
//
// Contract  A job's Work is complete once the job has returned or thrown. The first job starts the
//           thread. close() runs all jobs, then joins it. Waits call on_nap as os/call_lock does.
// Threads   any thread may call. A job must not submit, nor close.
// Tests     tests/test_communicator.py, tests/cpp/group_test.cpp
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

// What a job does, in words, and what it waits for: for messages, from any thread.
using Describe = std::function<std::string(bool has_begun)>;

// The outcome of a submitted job. A forked child refuses those that were not done.
class Work {
 public:
  explicit Work(Describe describe = nullptr, std::function<void()> interrupt = nullptr)
      : describe_(std::move(describe)), interrupt_(std::move(interrupt)) {}

  bool is_completed() const;
  bool wait(std::chrono::nanoseconds timeout);
  std::string describe();
  // A signal has ended a wait for it: ends the job's group too, if the job is not done.
  void interrupt() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (interrupt_) interrupt_();
  }
  void begin() {
    const std::lock_guard<std::mutex> lock(mutex_);
    has_begun_ = true;
  }
  std::exception_ptr exception() const { return is_completed() ? error_ : nullptr; }
  // On the steady clock; 0 while it runs.
  std::int64_t finished_ns() const { return is_completed() ? finished_ns_ : 0; }
  void complete(std::exception_ptr error);

 private:
  const ForkGuard process_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_begun_ = false;
  // None of the two once it is done: what they look at may go then.
  Describe describe_;
  std::function<void()> interrupt_;
  std::atomic<bool> done_{false};  // set after the two below, which stay as they are
  std::int64_t finished_ns_ = 0;
  std::exception_ptr error_;
};

class WorkQueue {
 public:
  explicit WorkQueue(const CallLock& call_lock) : call_lock_(call_lock) {}
  ~WorkQueue() { close(&ignore_naps); }

  // Throws once closed, and where the system refuses a thread; the job has then not been queued.
  std::shared_ptr<Work> submit(std::function<void()> job, Describe describe,
                               std::function<void()> interrupt = nullptr);
  // Whether the caller is a job, or what goes with one: it must not wait for the queue's end.
  bool is_worker_thread() const { return worker_.load() == std::this_thread::get_id(); }
  bool has_work() const { return num_waiting_.load(std::memory_order_acquire) > 0; }
  void wait_until_idle(const OnNap& on_nap);
  // Where on_nap throws nothing new is accepted, and what was submitted goes on.
  void close(const OnNap& on_nap);

 private:
  struct Job {
    std::function<void()> run;
    std::shared_ptr<Work> work;
  };

  void run_jobs();

  const CallLock& call_lock_;
  std::mutex close_mutex_;  // held by the one thread that joins
  std::mutex mutex_;        // guards all below
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  bool is_busy_ = false;  // the thread runs what it took off the queue
  bool is_closing_ = false;
  std::unique_ptr<std::thread> thread_;
  std::atomic<std::thread::id> worker_{};
  std::atomic<int> num_waiting_{0};  // queued or running
};

}  // namespace pyringar
