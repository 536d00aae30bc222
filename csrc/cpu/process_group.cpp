// process_group: joining, locks, registered memory, and what is refused.
//
// Floor     cpu
// Tests     tests/test_processes.py, tests/test_process_faults.py, tests/cpp/process_test.cpp

#include "cpu/process_group.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "cpu/float_mode.h"

namespace pyringar {

ProcessGroup::ProcessGroup(SharedMemory memory, Segment segment, int rank,
                           ProcessGroupOptions options)
    : memory_(std::move(memory)),
      segment_(segment),
      rank_(rank),
      checks_digests_(options.checks_digests),
      fork_generation_(fork_generation()),
      watch_(segment_, rank, options.timeout),
      self_{segment_, rank, watch_} {
  RankLine& line = segment_.line(rank);
  if (line.state.load() != static_cast<std::uint32_t>(RankState::kAbsent)) {
    fail(ErrorKind::kState, "rank ", rank, " has joined this group before, as process ",
         line.process.pid);
  }
  line.process = this_process();
  const std::string host = host_name();
  std::memcpy(line.host.data(), host.data(), std::min(host.size(), line.host.size() - 1));
  line.state.store(static_cast<std::uint32_t>(RankState::kJoined), std::memory_order_release);
}

ProcessGroup::~ProcessGroup() { close(); }

std::vector<int> ProcessGroup::absent_ranks() const {
  std::vector<int> absent;
  for (int rank = 0; rank < world_size(); ++rank) {
    if (segment_.line(rank).state.load(std::memory_order_acquire) ==
        static_cast<std::uint32_t>(RankState::kAbsent)) {
      absent.push_back(rank);
    }
  }
  return absent;
}

bool ProcessGroup::forked() const { return fork_generation() != fork_generation_; }

void ProcessGroup::check_usable() const {
  if (forked()) {
    fail(ErrorKind::kState,
         "this communicator was made before fork() and is the parent process's rank. Make a new "
         "one in the child");
  }
  if (closed_.load(std::memory_order_acquire)) {
    fail(ErrorKind::kState, "this communicator is closed");
  }
}

void ProcessGroup::check_not_failed() const {
  if (watch_.failed()) {
    fail(ErrorKind::kState,
         "this communicator failed before and cannot be used again: ", watch_.failure());
  }
}

void ProcessGroup::run(const ProcessCall& call) {
  check_usable();
  queue_.wait_until_idle();
  const std::lock_guard<std::mutex> lock(run_mutex_);
  run_locked(call, false);
}

std::shared_ptr<Work> ProcessGroup::submit(ProcessCall call) {
  check_usable();
  auto shared = std::make_shared<ProcessCall>(std::move(call));
  return queue_.submit([this, shared] {
    const std::lock_guard<std::mutex> lock(run_mutex_);
    run_locked(*shared, true);
  });
}

void ProcessGroup::run_program(const Program& program) {
  check_usable();
  queue_.wait_until_idle();
  const std::lock_guard<std::mutex> lock(run_mutex_);
  run_program_locked(program);
}

std::shared_ptr<Work> ProcessGroup::submit_program(Program program) {
  check_usable();
  return queue_.submit([this, program = std::move(program)] {
    const std::lock_guard<std::mutex> lock(run_mutex_);
    run_program_locked(program);
  });
}

std::shared_ptr<Work> ProcessGroup::submit_step(std::function<void()> step) {
  check_usable();
  return queue_.submit(std::move(step));
}

void ProcessGroup::run_program_locked(const Program& program) {
  check_ready();
  self_.sleep_in(Phase::kIdle);
  bool is_done = false;
  try {
    is_done = program(self_);
  } catch (const Error& error) {
    watch_.report(error.kind(), join(watch_.name_of(rank_), ": ", error.what()));
    throw;
  }
  if (!is_done) watch_.raise();
}

void ProcessGroup::check_ready() {
  check_usable();
  check_not_failed();
  if (watch_.adopt_shared_failure()) watch_.raise();
}

void ProcessGroup::run_locked(const ProcessCall& call, bool is_background) {
  check_ready();
  const DefaultFloatMode mode;
  const auto start = Clock::now();
  self_.sleep_in(Phase::kIdle);
  for (const ProcessCall::Staged& staged : call.staged) {
    if (staged.is_input) pack(staged.view, staged.dense.get());
  }
  if (!run_process_call(call, self_, is_background)) watch_.raise();
  if (flips_bit_ && !call.outputs.empty() && call.outputs[0].numel > 0) {
    call.outputs[0].data[0] ^= std::byte{1};
    flips_bit_ = false;
  }
  const bool is_alike = call.kind != CallKind::kReduceScatter && call.kind != CallKind::kBarrier;
  if (checks_digests_ && is_alike && !compare_digests(digest_of(call.outputs), self_)) {
    watch_.raise();
  }
  for (const ProcessCall::Staged& staged : call.staged) {
    if (staged.is_output) unpack(staged.dense.get(), staged.view);
  }
  const auto busy = std::chrono::nanoseconds(Clock::now() - start).count();
  const auto i = static_cast<std::size_t>(algorithm_of(call, segment_));
  stats_.calls[i] += 1;
  stats_.bytes[i] += call.bytes();
  stats_.busy_ns[i] += static_cast<std::uint64_t>(busy);
}

void ProcessGroup::close() {
  if (forked()) return;
  queue_.close();
  const std::lock_guard<std::mutex> lock(run_mutex_);
  if (closed_.exchange(true)) return;
  segment_.line(rank_).state.store(static_cast<std::uint32_t>(RankState::kLeft),
                                   std::memory_order_release);
  memory_.close_fd();
  const std::lock_guard<std::mutex> regions_lock(regions_mutex_);
  regions_.clear();
}

ProcessStats ProcessGroup::stats() {
  const std::lock_guard<std::mutex> lock(run_mutex_);
  return stats_;
}

void ProcessGroup::set_on_nap(std::function<void()> on_nap) {
  const std::lock_guard<std::mutex> lock(run_mutex_);
  watch_.set_on_nap(std::move(on_nap));
}

void ProcessGroup::add_region(std::uint64_t id, std::vector<SharedMemory> mapped,
                              std::vector<std::byte*> bases, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(regions_mutex_);
  regions_.push_back({id, std::move(mapped), std::move(bases), bytes});
}

void ProcessGroup::remove_region(std::uint64_t id) {
  const std::lock_guard<std::mutex> lock(regions_mutex_);
  std::erase_if(regions_, [id](const Region& region) { return region.id == id; });
}

void ProcessGroup::find_registered(ProcessCall& call) {
  if (call.kind != CallKind::kAllReduce) return;
  const std::lock_guard<std::mutex> lock(regions_mutex_);
  if (regions_.empty()) return;
  std::uint64_t places = 1;
  std::vector<std::vector<void*>> registered;
  for (const TensorSpan& tensor : call.outputs) {
    if (tensor.numel == 0) {
      registered.emplace_back();
      continue;
    }
    const auto found = std::find_if(regions_.begin(), regions_.end(), [&](const Region& region) {
      const std::byte* base = region.bases[static_cast<std::size_t>(rank_)];
      return tensor.data >= base && tensor.data + tensor.bytes() <= base + region.bytes;
    });
    if (found == regions_.end()) return;
    const auto offset =
        static_cast<std::size_t>(tensor.data - found->bases[static_cast<std::size_t>(rank_)]);
    places = mix(mix(places, found->id), offset);
    registered.emplace_back();
    for (std::byte* base : found->bases) registered.back().push_back(base + offset);
  }
  if (call.bytes() == 0) return;
  call.places = places;
  call.registered = std::move(registered);
}

void ProcessGroup::delay(Phase phase, std::chrono::nanoseconds time) {
  const std::lock_guard<std::mutex> lock(run_mutex_);
  self_.delay = {phase, time};
}

void ProcessGroup::flip_bit_of_next() {
  const std::lock_guard<std::mutex> lock(run_mutex_);
  flips_bit_ = true;
}

}  // namespace pyringar
