// thread_pool: open a job, let helpers join, close the job, wait for the helpers that joined.
#include "os/thread_pool.h"

#include <algorithm>
#include <system_error>
#include <utility>

namespace pyringar {

namespace {

// Helpers are woken for small jobs too if jobs follow each other faster than this.
constexpr auto kStaysWarm = std::chrono::milliseconds(1);

}  // namespace

ThreadPool::~ThreadPool() {
  stop_.store(1, std::memory_order_release);
  generation_.set(generation_.value.load(std::memory_order_relaxed) + 1);
  for (std::thread& helper : helpers_) helper.join();
}

int ThreadPool::count_helpers() {
  const int num_cores = affinity_.update_cores();
  if (follows_cores_) num_helpers_ = num_cores - 1;
  return num_helpers_;
}

void ThreadPool::start_helpers() {
  const std::uint32_t seen = generation_.value.load(std::memory_order_relaxed);
  const auto wanted = static_cast<std::size_t>(num_helpers_);
  helpers_.reserve(wanted);
  try {
    while (helpers_.size() < wanted) {
      const int thread = static_cast<int>(helpers_.size()) + 1;
      helpers_.emplace_back([this, thread, seen] { help(thread, seen); });
    }
  } catch (const std::system_error&) {
    // The system refuses more threads: continue with the helpers that have started.
  }
}

bool ThreadPool::is_cold() {
  const Deadline before = last_asked_;
  last_asked_ = Clock::now();
  const bool sleeps = helpers_.empty() || generation_.sleepers.load(std::memory_order_relaxed) > 0;
  return sleeps && last_asked_ - before > kStaysWarm;
}

void ThreadPool::run(const std::function<void(int)>& work, std::size_t max_helpers) {
  const int most = static_cast<int>(std::min(max_helpers, static_cast<std::size_t>(num_helpers_)));
  if (most == 0) return work(0);
  if (static_cast<int>(helpers_.size()) < num_helpers_) start_helpers();
  affinity_.keep_off_caller(helpers_);
  work_ = &work;
  most_inside_.store(static_cast<std::uint32_t>(most), std::memory_order_relaxed);
  const std::uint32_t left_before = left_.value.load(std::memory_order_acquire);
  state_.store(0, std::memory_order_release);
  generation_.set(generation_.value.load(std::memory_order_relaxed) + 1, most);
  attempt_work(0);
  const std::uint32_t inside = state_.fetch_or(kClosed, std::memory_order_acq_rel);
  // Wait without a deadline: the helpers use `work`, which is on the caller's stack.
  if (inside > 0) wait_for_flag(left_, left_before + 1);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::attempt_work(int thread) noexcept {
  try {
    (*work_)(thread);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(error_mutex_);
    if (!error_) error_ = std::current_exception();
  }
}

bool ThreadPool::join_open_job() {
  std::uint32_t inside = state_.load(std::memory_order_acquire);
  while ((inside & kClosed) == 0 && inside < most_inside_.load(std::memory_order_relaxed)) {
    if (state_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
}

void ThreadPool::help(int thread, std::uint32_t seen) {
  while (true) {
    wait_for_flag(generation_, seen + 1);
    seen = generation_.value.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_acquire) != 0) return;
    if (!join_open_job()) continue;
    attempt_work(thread);
    // The last helper of a closed job wakes the caller, and must not use the job after that.
    if (state_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1u)) {
      left_.set(left_.value.load(std::memory_order_relaxed) + 1);
    }
  }
}

}  // namespace pyringar
