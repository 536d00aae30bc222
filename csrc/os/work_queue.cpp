// work_queue: a deque of jobs, one thread, and the notification of waiters.
#include "os/work_queue.h"

#include <system_error>
#include <utility>

#include "core/error.h"

namespace pyringar {

bool Work::is_completed() const {
  if (done_.load(std::memory_order_acquire)) return true;
  if (process_.forked()) {
    fail(
        ErrorKind::kState,
        "this work was begun before fork() and belongs to the parent process; the child cannot see "
        "its end");
  }
  return false;
}

bool Work::wait(std::chrono::nanoseconds timeout) {
  if (!is_completed()) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, timeout, [this] { return is_completed(); })) return false;
  }
  if (error_) std::rethrow_exception(error_);
  return true;
}

std::string Work::describe() {
  if (is_completed()) return "";
  const std::lock_guard<std::mutex> lock(mutex_);
  return describe_ ? describe_(has_begun_) : "";
}

void Work::complete(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  finished_ns_ = std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  error_ = std::move(error);
  describe_ = nullptr;
  interrupt_ = nullptr;
  done_.store(true, std::memory_order_release);
  changed_.notify_all();
}

std::shared_ptr<Work> WorkQueue::submit(std::function<void()> job, Describe describe,
                                        std::function<void()> interrupt) {
  call_lock_.check_not_held_by_caller();  // a lock holder that waits for the work would deadlock
  auto work = std::make_shared<Work>(std::move(describe), std::move(interrupt));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (is_closing_) fail_closed();
  try {
    if (!thread_) thread_ = std::make_unique<std::thread>([this] { run_jobs(); });
  } catch (const std::system_error& error) {
    fail(ErrorKind::kState, "cannot start the background thread: ", error.what());
  }
  jobs_.push_back({std::move(job), work});
  num_waiting_.fetch_add(1, std::memory_order_release);
  changed_.notify_all();
  return work;
}

void WorkQueue::run_jobs() {
  worker_.store(std::this_thread::get_id());
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
    // Keep the lock: a thread that sees the work done may close the queue and join this thread.
    next.work->complete(std::move(error));
    changed_.notify_all();
    // Release the lock: destroying a Python exception takes the GIL, and submitters hold the GIL.
    lock.unlock();
    next.work.reset();
    lock.lock();
  }
}

void WorkQueue::wait_until_idle(const OnNap& on_nap) {
  const auto is_idle = [this] { return jobs_.empty() && !is_busy_; };
  while (has_work()) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (changed_.wait_for(lock, kNapInterval, is_idle)) return;
    }
    on_nap();
  }
}

void WorkQueue::close(const OnNap& on_nap) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_closing_ = true;
    changed_.notify_all();
  }
  wait_until_idle(on_nap);
  const std::lock_guard<std::mutex> closing(close_mutex_);
  if (thread_) thread_->join();
  worker_.store({});  // a later thread may get this thread's id
  thread_.reset();
}

}  // namespace pyringar
