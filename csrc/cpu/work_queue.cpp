// work_queue: a deque, a thread, and who is told when.
//
// Floor     cpu
// Tests     tests/test_communicator.py, tests/cpp/group_test.cpp

#include "cpu/work_queue.h"

#include <system_error>
#include <utility>

#include "core/error.h"

namespace pyringar {

bool Work::is_completed() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

bool Work::wait(std::chrono::nanoseconds timeout) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (!changed_.wait_for(lock, timeout, [this] { return done_; })) return false;
  if (error_) std::rethrow_exception(error_);
  return true;
}

std::string Work::describe() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return describe_ ? describe_(has_begun_) : "";
}

void Work::begin() {
  const std::lock_guard<std::mutex> lock(mutex_);
  has_begun_ = true;
}

std::exception_ptr Work::exception() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Work::complete(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  finished_ns_ = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  error_ = std::move(error);
  describe_ = nullptr;
  changed_.notify_all();
}

std::int64_t Work::finished_ns() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finished_ns_;
}

std::shared_ptr<Work> WorkQueue::submit(std::function<void()> job, Describe describe) {
  auto work = std::make_shared<Work>(std::move(describe));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_closing_) fail(ErrorKind::kState, "this communicator is closed");
  start_thread();
  jobs_.push_back({std::move(job), work});
  num_waiting_.fetch_add(1, std::memory_order_release);
  changed_.notify_all();
  return work;
}

void WorkQueue::start_thread() {
  if (thread_) return;
  try {
    thread_ = std::make_unique<std::thread>([this] { work_off(); });
  } catch (const std::system_error& error) {
    fail(ErrorKind::kState, "cannot start a thread for work in the background: ", error.what());
  }
}

void WorkQueue::work_off() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return is_closing_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    Job next = std::move(jobs_.front());
    jobs_.pop_front();
    is_busy_ = true;
    lock.unlock();
    next.work->begin();
    std::exception_ptr error;
    try {
      next.run();
    } catch (...) {
      error = std::current_exception();
    }
    next.run = nullptr;
    lock.lock();
    is_busy_ = false;
    num_waiting_.fetch_sub(1, std::memory_order_release);
    // Under the lock: who sees the work done may close the queue, which waits for this thread.
    next.work->complete(std::move(error));
    changed_.notify_all();
  }
}

void WorkQueue::wait_until_idle() {
  if (!has_work()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return jobs_.empty() && !is_busy_; });
}

bool WorkQueue::wait_until_idle(std::chrono::nanoseconds timeout) {
  if (!has_work()) return true;
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, timeout, [this] { return jobs_.empty() && !is_busy_; });
}

void WorkQueue::close() {
  const std::lock_guard<std::mutex> closing(close_mutex_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
    changed_.notify_all();
  }
  if (thread_) thread_->join();
  thread_.reset();
}

}  // namespace pyringar
