// group: locks, queues and dispatch.
//
// Floor     cpu
// Tests     tests/test_communicator.py, tests/cpp/stress.cpp

#include "cpu/group.h"

#include <pthread.h>

#include <system_error>

#include "core/error.h"
#include "cpu/float_mode.h"

namespace pyringar {

namespace {

std::atomic<std::uint32_t> fork_count{0};

std::uint32_t fork_generation() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });
  if (registered != 0) fail(ErrorKind::kState, "pthread_atfork failed with error ", registered);
  return fork_count.load(std::memory_order_relaxed);
}

}  // namespace

const char* algorithm_name(Algorithm algorithm) {
  constexpr const char* kNames[kNumAlgorithms] = {"fused", "direct", "ring"};
  return kNames[static_cast<int>(algorithm)];
}

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

std::exception_ptr Work::exception() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Work::complete(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  done_ = true;
  finished_ns_ = Clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  error_ = std::move(error);
  changed_.notify_all();
}

std::int64_t Work::finished_ns() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return finished_ns_;
}

Group::Group(int world_size, std::chrono::nanoseconds timeout)
    : world_size_(world_size),
      timeout_(timeout),
      fork_generation_(fork_generation()),
      pool_(std::make_unique<ThreadPool>(static_cast<int>(allowed_cores().size()) - 1)) {}

Group::~Group() { close(); }

bool Group::forked() const {
  return fork_count.load(std::memory_order_relaxed) != fork_generation_;
}

void Group::check_not_forked() const {
  if (forked()) {
    fail(ErrorKind::kState,
         "this communicator was made before fork(); its threads stayed in the parent process. "
         "Make a new Communicator in the child");
  }
}

void Group::check_usable() const {
  check_not_forked();
  if (closed_.load(std::memory_order_acquire)) {
    fail(ErrorKind::kState, "this communicator is closed");
  }
}

void Group::check_not_failed() const {
  if (!failure_.empty()) {
    fail(ErrorKind::kState, "this communicator failed before and cannot be used again: ", failure_);
  }
}

void Group::wait_for_queue() {
  if (num_waiting_.load(std::memory_order_acquire) > 0) {
    std::unique_lock<std::mutex> lock(queue_mutex_);
    queue_changed_.wait(lock, [this] { return queue_.empty() && !queue_busy_; });
  }
}

void Group::wait_for_turn() {
  check_usable();
  wait_for_queue();
  const std::lock_guard<std::mutex> lock(run_mutex_);
  check_usable();
  check_not_failed();
}

void Group::run(const Collective& collective) {
  check_usable();
  wait_for_queue();
  const std::lock_guard<std::mutex> lock(run_mutex_);
  run_locked(collective);
}

bool Group::try_run(const Collective& collective) {
  check_usable();
  if (num_waiting_.load(std::memory_order_acquire) > 0) return false;
  const std::unique_lock<std::mutex> lock(run_mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;
  run_locked(collective);
  return true;
}

void Group::run_locked(const Collective& collective) {
  check_usable();
  check_not_failed();
  const DefaultFloatMode mode;
  const auto start = Clock::now();
  for (const Collective::Staged& staged : collective.staged) {
    if (staged.is_input) pack(staged.view, staged.dense.get());
  }
  dispatch(collective);
  for (const Collective::Staged& staged : collective.staged) {
    if (staged.is_output) unpack(staged.dense.get(), staged.view);
  }
  const auto busy = std::chrono::nanoseconds(Clock::now() - start).count();
  const auto i = static_cast<std::size_t>(collective.algorithm);
  stats_.calls[i] += 1;
  stats_.bytes[i] += collective.bytes;
  stats_.busy_ns[i] += static_cast<std::uint64_t>(busy);
}

void Group::dispatch(const Collective& collective) {
  switch (collective.algorithm) {
    case Algorithm::kFused:
      return run_fused(collective.reductions, collective.op, collective.divisor, *pool_);
    case Algorithm::kDirect:
      return run_direct(collective);
    case Algorithm::kRing:
      return run_ring_collective(collective);
  }
}

void Group::run_direct(const Collective& collective) {
  if (!team_) team_ = std::make_unique<RankTeam>(world_size_);
  if (!barrier_) barrier_ = std::make_unique<Barrier>(world_size_);
  const std::uint32_t base = barrier_->passed;
  Watch watch(timeout_);
  watch.start();
  team_->run([&](int rank) {
    sleep_if_delayed(rank);
    direct_rank(rank, collective.reductions, collective.op, collective.divisor, *barrier_, base,
                watch);
  });
  barrier_->passed += kDirectBarriers;
  finish_team_run(collective, watch);
}

void Group::run_ring_collective(const Collective& collective) {
  if (!team_) team_ = std::make_unique<RankTeam>(world_size_);
  if (!ring_) ring_ = std::make_unique<RingLinks>(world_size_);
  Watch watch(timeout_);
  watch.start();
  team_->run([&](int rank) {
    sleep_if_delayed(rank);
    std::uint32_t base = ring_->messages;
    for (const RingBuffers& buffers : collective.rings) {
      if (!ring_rank(rank, buffers, collective.op, collective.divisor, *ring_, base, watch)) return;
      base += ring_num_messages(buffers.program(rank, *ring_, base));
    }
  });
  for (const RingBuffers& buffers : collective.rings) {
    ring_->messages += ring_num_messages(buffers.program(0, *ring_, ring_->messages));
  }
  finish_team_run(collective, watch);
}

void Group::finish_team_run(const Collective& collective, Watch& watch) {
  delayed_rank_ = -1;
  const std::string failure = watch.failure();
  if (failure.empty()) return;
  failure_ = join(collective.operation, ": ", failure);
  fail(ErrorKind::kTimeout, failure_);
}

void Group::sleep_if_delayed(int rank) {
  if (rank == delayed_rank_) std::this_thread::sleep_for(delay_);
}

void Group::delay_rank(int rank, std::chrono::nanoseconds delay) {
  const std::lock_guard<std::mutex> lock(run_mutex_);
  delayed_rank_ = rank;
  delay_ = delay;
}

std::shared_ptr<Work> Group::submit(Collective collective) {
  auto work = std::make_shared<Work>();
  const std::lock_guard<std::mutex> lock(queue_mutex_);
  check_usable();
  if (closing_) fail(ErrorKind::kState, "this communicator is closed");
  start_worker();  // first: where the system refuses a thread, nothing has been queued
  queue_.push_back({std::move(collective), work});
  num_waiting_.fetch_add(1, std::memory_order_release);
  queue_changed_.notify_all();
  return work;
}

void Group::start_worker() {
  if (worker_) return;
  try {
    worker_ = std::make_unique<std::thread>([this] { work_off_queue(); });
  } catch (const std::system_error& error) {
    fail(ErrorKind::kState, "cannot start a thread for work in the background: ", error.what());
  }
}

void Group::work_off_queue() {
  std::unique_lock<std::mutex> lock(queue_mutex_);
  while (true) {
    queue_changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Submitted next = std::move(queue_.front());
    queue_.pop_front();
    queue_busy_ = true;
    lock.unlock();
    std::exception_ptr error;
    try {
      const std::lock_guard<std::mutex> running(run_mutex_);
      run_locked(next.collective);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    queue_busy_ = false;
    num_waiting_.fetch_sub(1, std::memory_order_release);
    // Under the lock: who sees the work done may close the group, which waits for this thread.
    next.work->complete(std::move(error));
    queue_changed_.notify_all();
  }
}

void Group::close() {
  if (forked()) return;
  const std::lock_guard<std::mutex> closing(close_mutex_);
  {
    const std::lock_guard<std::mutex> lock(queue_mutex_);
    closing_ = true;
    queue_changed_.notify_all();
  }
  if (worker_) worker_->join();
  const std::lock_guard<std::mutex> lock(run_mutex_);
  closed_.store(true, std::memory_order_release);
  worker_.reset();
  team_.reset();
  pool_.reset();
  ring_.reset();
  barrier_.reset();
}

GroupStats Group::stats() {
  check_not_forked();
  const std::lock_guard<std::mutex> lock(run_mutex_);
  return stats_;
}

}  // namespace pyringar
