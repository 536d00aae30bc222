// group: see the header.
//
// Floor     cuda
// Tests     tests/cpp/cuda_host/group_test.cpp, tests/test_cuda.py

#include "cuda/group.h"

#include <utility>

#include "core/error.h"

namespace pyringar::cuda {

namespace {

// Launches that wait across devices, in the order in which all devices run them.
struct LaunchOrder {
  std::mutex mutex;
  std::map<int, Event> last;  // by device

  static LaunchOrder& get() {
    static auto* order = new LaunchOrder;  // never destroyed: CUDA may be gone by then
    return *order;
  }
  const Event& of(int device) {
    const auto found = last.find(device);
    return found != last.end() ? found->second : last.emplace(device, Event(device)).first->second;
  }
};

}  // namespace

Group::~Group() { close(); }

void Group::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (broken_.empty()) broken_ = "the communicator is closed";
  synchronize();  // kernels under way use what is released now
  ring_.reset();
  staging_.clear();
  per_device_.clear();
}

void Group::withhold_rank(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  withheld_rank_ = rank;
}

GroupStats Group::stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

void Group::check_usable() {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable_locked();
}

void Group::check_usable_locked() {
  if (!broken_.empty()) fail(broken_kind_, broken_);
  const Failure* earliest = nullptr;
  for (const Device& device : per_device_) {
    const auto* failure = as<const Failure>(device.failure);
    if (__atomic_load_n(&failure->is_set, __ATOMIC_ACQUIRE) == 0) continue;
    // Who waits for the earliest step waits for the culprit; the others wait for that one.
    const auto turn = [](const Failure* f) { return std::pair(f->step, f->what); };
    if (earliest == nullptr || turn(failure) < turn(earliest)) earliest = failure;
  }
  if (earliest == nullptr) return;
  const std::string reason = describe_failure(*earliest);
  broken_ = join("this communicator failed before and cannot be used again: ", reason);
  broken_kind_ = ErrorKind::kTimeout;
  fail(broken_kind_, reason);
}

void Group::run(const Collective& collective, std::span<const cudaStream_t> streams) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable_locked();
  operation_ = collective.operation;
  const auto at = static_cast<std::size_t>(collective.algorithm);
  ++stats_.calls[at];
  stats_.bytes[at] += collective.bytes;
  if (collective.tensors.empty()) return;
  const bool waits = devices_.size() > 1 || collective.algorithm == Algorithm::kRing;
  const bool capturing = is_capturing(streams[0], devices_[0]);
  LaunchOrder& order = LaunchOrder::get();
  std::unique_lock<std::mutex> in_order(order.mutex, std::defer_lock);
  if (waits && !capturing) {
    in_order.lock();
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      order.of(devices_[d]).make_wait(streams[d], devices_[d]);
    }
  }
  if (collective.algorithm == Algorithm::kRing) {
    prepare_ring(capturing);
    for (const Buffers& tensor : collective.tensors) run_ring(tensor, collective.fold, streams);
  } else if (needs_staging(collective)) {
    const Collective copy = staged(collective, streams);
    run_tables(copy, streams);
    unstage(collective, copy, streams);
  } else {
    run_tables(collective, streams);
  }
  if (waits && !capturing) {
    for (std::size_t d = 0; d < devices_.size(); ++d) order.of(devices_[d]).record(streams[d]);
  }
}

}  // namespace pyringar::cuda
