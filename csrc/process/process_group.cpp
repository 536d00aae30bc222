// process_group: joins and closes the group, locks, and refuses calls.
#include "process/process_group.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "os/float_mode.h"

namespace pyringar {

namespace {

constexpr const char* kInterrupted = "has left the group in the midst of a call";

}  // namespace

ProcessGroup::ProcessGroup(SharedMemory memory, Segment segment, int rank,
                           ProcessGroupOptions options)
    : memory_(std::move(memory)),
      segment_(segment),
      rank_(rank),
      compares_shapes_(options.compares_shapes),
      on_nap_(std::move(options.on_nap)),
      watch_(segment_, rank, options.timeout),
      self_{segment_, rank, watch_} {
  RankLine& line = segment_.line(rank);
  line.process = this_process();
  const std::string host = host_name();
  std::memcpy(line.host.data(), host.data(), std::min(host.size(), line.host.size() - 1));
  // A test may start all counters at another value than 0.
  self_.messages = line.announced.value.load(std::memory_order_relaxed);
  line.cores = allowed_cores();
  line.state.store(RankState::kJoined, std::memory_order_release);
  watch_.set_on_nap(on_nap_);
  watch_.set_on_wait(options.on_wait);
  self_.on_announce = options.on_announce;
}

std::vector<int> ProcessGroup::absent_ranks() const {
  std::vector<int> absent;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (segment_.line(rank).state.load() == RankState::kAbsent) absent.push_back(rank);
  }
  return absent;
}

CallLock::Held ProcessGroup::lock_calls() {
  check_usable();
  call_lock_.check_not_held_by_caller();
  if (!queue_.has_work() && call_lock_.try_lock()) return {call_lock_, std::adopt_lock};
  watch_.before_wait();
  try {
    queue_.wait_until_idle(on_nap_);
    return call_lock_.acquire(on_nap_);
  } catch (...) {
    abort(kInterrupted);
    throw;
  }
}

// Queue a job that runs under the lock. If a signal ends a wait for the job, abort the group.
std::shared_ptr<Work> ProcessGroup::enqueue(std::function<void()> job, Describe describe) {
  check_usable();
  return queue_.submit(
      [this, job = std::move(job)] {
        const CallLock::Held held = call_lock_.acquire([this] { check_usable(); });
        job();
      },
      std::move(describe), [this] { abort(kInterrupted); });
}

std::shared_ptr<Work> ProcessGroup::submit(Collective call) {
  auto shared = std::make_shared<const Collective>(std::move(call));
  return submit_program([this, shared](ProcessRank&) { return run_call(*shared, true); }, shared);
}

std::string ProcessGroup::describe(const Collective& call, bool has_begun) const {
  const std::string awaited = watch_.awaited();
  const std::string what =
      join(record_of(call, segment_).text(), " of rank ", watch_.global_rank(rank_));
  if (has_begun)
    return join(what, awaited.empty() ? ", which runs" : ", which waits for ", awaited);
  return join(what, ", which waits for the calls before it",
              awaited.empty() ? "" : " and they for ", awaited);
}

std::shared_ptr<Work> ProcessGroup::submit_program(Program program,
                                                   std::shared_ptr<const Collective> call) {
  return enqueue(
      [this, program = std::move(program)] { run_program_locked(program); },
      [this, call = std::move(call)](bool has_begun) { return describe(*call, has_begun); });
}

std::shared_ptr<Work> ProcessGroup::submit_step(std::function<void()> step) {
  return enqueue(std::move(step), [](bool has_begun) {
    return join("a copy on this rank, which ",
                has_begun ? "runs" : "waits for the calls before it");
  });
}

void ProcessGroup::run_program_locked(const Program& program) {
  check_usable();
  if (watch_.failed()) fail_after(watch_.kind(), watch_.failure());
  if (watch_.adopt_shared_failure()) watch_.raise();
  const DefaultFloatMode mode;
  self_.sleep_in(Phase::kIdle);
  bool is_done = false;
  try {
    is_done = program(self_);
  } catch (const std::exception& error) {
    // Fail the group: other ranks may be in this call, and must not match it with the next call.
    const auto* ours = dynamic_cast<const Error*>(&error);
    watch_.report(ours != nullptr ? ours->kind() : ErrorKind::kState,
                  join(watch_.name_of(rank_), ": ", error.what()));
    throw;
  }
  if (is_done) return;
  if (closed_.load(std::memory_order_acquire)) {
    fail(ErrorKind::kState, "this communicator was closed while a call waited: ", watch_.failure());
  }
  watch_.raise();
}

bool ProcessGroup::run_call(const Collective& call, bool is_background) {
  if (attempt(call, is_background)) return true;
  if (!self_.layouts_differ) return false;
  if (attempt(in_index_order(call), is_background)) return true;
  if (self_.layouts_differ) fail(ErrorKind::kState, "the other ranks make another call");
  return false;
}

bool ProcessGroup::attempt(const Collective& call, bool is_background) {
  const auto start = Clock::now();
  if (!run_process_call(call, self_, is_background)) return false;
  const auto busy = Clock::now() - start;
  const std::lock_guard<std::mutex> lock(stats_mutex_);
  stats_.add(algorithm_of(call, segment_), call.bytes, busy);
  return true;
}

bool ProcessGroup::end_calls(CloseMode mode) {
  if (forked()) return false;
  if (mode == CloseMode::kAborting) abort("has aborted the group");
  if (queue_.is_worker_thread()) {
    abort(kInterrupted);
    return false;
  }
  call_lock_.check_not_held_by_caller();
  try {
    queue_.close(on_nap_);
    const CallLock::Held held = call_lock_.acquire(on_nap_);
    closed_.store(true, std::memory_order_release);
  } catch (...) {
    abort(kInterrupted);
    throw;
  }
  return true;
}

bool ProcessGroup::close(CloseMode mode) {
  if (!end_calls(mode)) return false;
  segment_.line(rank_).state.store(RankState::kLeft, std::memory_order_release);
  memory_.close_fd();
  return true;
}

// A running call finds the failure after at most one nap; queued calls are refused.
void ProcessGroup::abort(const std::string& how) {
  if (forked() || closed_.exchange(true)) return;
  tell_failure(segment_, ErrorKind::kPeerLost,
               join(watch_.name_of(rank_), " ", how, "; ", watch_.last_call_of(rank_)));
}

ProcessStats ProcessGroup::stats() {
  check_not_forked();
  const std::lock_guard<std::mutex> lock(stats_mutex_);
  return stats_;
}

void ProcessGroup::delay(Phase phase, std::chrono::nanoseconds time) {
  check_usable();
  const CallLock::Held held = call_lock_.acquire(on_nap_);
  self_.delay = {phase, time};
}

}  // namespace pyringar
