// group: takes the lock, queues background calls, and runs the code of the algorithm.
#include "cpu/group.h"

#include "core/error.h"
#include "cpu/strided.h"
#include "os/float_mode.h"

namespace pyringar {

Group::Group(int world_size, std::chrono::nanoseconds timeout, OnNap on_nap)
    : world_size_(world_size),
      timeout_(timeout),
      on_nap_(std::move(on_nap)),
      pool_(std::make_unique<ThreadPool>()) {}

void Group::check() {
  check_usable();
  const CallLock::Held held(call_lock_, std::try_to_lock);
  if (held.owns_lock()) check_not_failed();
}

CallLock::Held Group::lock_calls() {
  check_usable();
  queue_.wait_until_idle(on_nap_);
  return call_lock_.acquire(on_nap_);
}

bool Group::try_run(const Collective& collective) {
  check_usable();
  if (queue_.has_work()) return false;
  const CallLock::Held held(call_lock_, std::try_to_lock);
  if (!held.owns_lock()) return false;
  run_locked(collective, CallMode::kBlocking);
  return true;
}

void Group::run_locked(const Collective& collective, CallMode mode) {
  check_usable();
  check_not_failed();
  const DefaultFloatMode float_mode;
  const auto start = Clock::now();
  for (const PackedTensor& tensor : collective.packed) {
    if (tensor.is_input) pack(tensor.view, tensor.dense.get());
  }
  if (collective.algorithm == Algorithm::kRing) {
    run_ring(collective, mode);
  } else {  // kFused and kDirect, which are equal in one memory
    run_fused(collective.tensors, collective.fold, *pool_, mode);
  }
  for (const PackedTensor& tensor : collective.packed) {
    if (tensor.is_output) unpack(tensor.dense.get(), tensor.view);
  }
  const auto busy = Clock::now() - start;
  const std::lock_guard<std::mutex> lock(stats_mutex_);
  stats_.add(collective.algorithm, collective.bytes, busy);
}

void Group::run_ring(const Collective& collective, CallMode mode) {
  if (!team_) team_ = std::make_unique<RankTeam>(world_size_);
  if (!ring_) ring_ = std::make_unique<RingLinks>(world_size_);
  Watch watch(world_size_, timeout_);
  const auto program = [&](int rank) {
    if (rank == delayed_rank_) (void)end_delay_.try_acquire_for(delay_);
    std::uint32_t base = ring_->messages;
    for (const Buffers& tensor : collective.tensors) {
      if (!ring_rank(rank, tensor, collective.fold, *ring_, base, watch)) return;
      base += ring_num_messages(ring_program(rank, tensor, *ring_, base));
    }
  };
  team_->run(program, mode);
  for (const Buffers& tensor : collective.tensors) {
    ring_->messages += ring_num_messages(ring_program(0, tensor, *ring_, ring_->messages));
  }
  delayed_rank_ = -1;
  const std::string failure = watch.failure();
  if (failure.empty()) return;
  failure_ = join(collective.operation, ": ", failure);
  failure_kind_ = ErrorKind::kTimeout;
  fail(failure_kind_, failure_);
}

void Group::delay_rank(int rank, std::chrono::nanoseconds delay) {
  check_usable();
  const CallLock::Held held = call_lock_.acquire(on_nap_);
  delayed_rank_ = rank;
  delay_ = delay;
}

// Run a small call in the caller's thread. Return null if it should run in the background.
std::shared_ptr<Work> Group::run_at_once(const Collective& collective) {
  const bool is_fused = collective.algorithm == Algorithm::kFused && collective.packed.empty();
  if (!is_fused || !is_best_done_at_once(collective.tensors)) return nullptr;
  std::exception_ptr error;
  try {
    if (!try_run(collective)) return nullptr;
  } catch (...) {
    error = std::current_exception();
    check_usable();  // if close() refused the call, throw here instead of returning a Work
  }
  auto work = std::make_shared<Work>();
  work->complete(std::move(error));
  return work;
}

std::shared_ptr<Work> Group::submit(Collective given) {
  check_usable();
  if (std::shared_ptr<Work> done = run_at_once(given)) return done;
  const auto collective = std::make_shared<const Collective>(std::move(given));
  return queue_.submit(
      [this, collective] {
        const CallLock::Held held = call_lock_.acquire([this] { check_usable(); });
        run_locked(*collective, CallMode::kBackground);
      },
      [this, collective](bool has_begun) {
        return join(collective->operation, " of ", collective->bytes, " bytes per rank over ",
                    world_size_, " ranks, which ",
                    has_begun ? "runs" : "waits for the calls before it");
      });
}

bool Group::close() {
  if (forked()) return false;
  CallLock::Held held;
  try {
    queue_.close(on_nap_);
    held = call_lock_.acquire(on_nap_);
  } catch (...) {
    closed_.store(true, std::memory_order_release);
    throw;
  }
  closed_.store(true, std::memory_order_release);
  team_.reset();
  pool_.reset();
  ring_.reset();
  return true;
}

GroupStats Group::stats() {
  check_not_forked();
  const std::lock_guard<std::mutex> lock(stats_mutex_);
  return stats_;
}

}  // namespace pyringar
