// group: see the header.
//
// Tests     tests/cpp/cuda_host/group_test.cpp, tests/cuda

#include "cuda/group.h"

#include <algorithm>
#include <map>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "cuda/folds.h"
#include "cuda/kernels.h"

namespace pyringar::cuda {

namespace {

// Launches that wait across devices, in the order in which all devices run them: while one of these
// lives, no other group enqueues such launches.
class LaunchOrder {
 public:
  LaunchOrder(const std::vector<int>& devices, Streams streams)
      : lock_(last().mutex), devices_(devices), streams_(streams) {
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      last_on(devices_[d]).make_wait(streams_[d], devices_[d]);
    }
  }
  void record() const {
    for (std::size_t d = 0; d < devices_.size(); ++d) last_on(devices_[d]).record(streams_[d]);
  }

 private:
  struct Last {
    std::mutex mutex;
    std::map<int, Event> by_device;
  };

  static Last& last() {
    static auto* last = new Last;  // never destroyed: CUDA may be gone by then
    return *last;
  }
  static const Event& last_on(int device) {
    return last().by_device.try_emplace(device, device).first->second;
  }

  const std::lock_guard<std::mutex> lock_;
  const std::vector<int>& devices_;
  const Streams streams_;
};

}  // namespace

Group::Group(std::vector<int> device_of_rank, std::chrono::nanoseconds timeout)
    : devices_(std::move(device_of_rank), timeout), staging_(devices_) {}

Group::~Group() { close(); }

void Group::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  is_closed_ = true;
  devices_.synchronize();  // kernels under way use what is released now
  ring_.reset();
  staging_.release();
  devices_.release();
}

void Group::withhold_rank(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  devices_.withhold_rank(rank);
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
  if (!failure_.empty()) fail_after(ErrorKind::kTimeout, failure_);
  if (is_closed_) fail_closed();
  const Failure* failure = devices_.earliest_failure();
  if (failure == nullptr) return;
  failure_ = devices_.describe(*failure, operation_);
  fail(ErrorKind::kTimeout, failure_);
}

void Group::run(const Collective& collective, Streams streams) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable_locked();
  operation_ = collective.operation;
  stats_.add(collective.algorithm, collective.bytes, {});
  if (collective.tensors.empty()) return;
  const bool waits = devices_.size() > 1 || collective.algorithm == Algorithm::kRing;
  const bool capturing = is_capturing(streams[0], devices()[0]);
  if (!waits || capturing) return enqueue(collective, streams, capturing);
  const LaunchOrder order(devices(), streams);
  enqueue(collective, streams, capturing);
  order.record();
}

void Group::enqueue(const Collective& collective, Streams streams, bool capturing) {
  if (collective.algorithm == Algorithm::kRing) {
    if (has_host_ranks()) {
      fail(ErrorKind::kUnsupported, operation_,
           ": ring does not support ranks in the host's memory; use algorithm 'auto'");
    }
    if (ring_ == nullptr) {
      check_may_allocate(capturing, operation_);
      ring_ = std::make_unique<RingLinks>(devices_, operation_);
    }
    for (const Buffers& tensor : collective.tensors) {
      ring_->launch(tensor, collective.fold, streams);
    }
  } else if (staging_.is_needed(collective)) {
    const Collective staged = staging_.copy_in(collective, streams, capturing);
    run_tables(staged, streams);
    staging_.copy_out(collective, staged, streams);
  } else {
    run_tables(collective, streams);
  }
}

void Group::run_tables(const Collective& collective, Streams streams) {
  const TensorList list{collective.tensors, collective.fold, collective.operation};
  if (devices_.size() == 1) return launch_fused(list, devices()[0], streams[0]);
  launch_tables(list, devices_.size(), [&]<typename T>(DType dtype, T* tables) {
    launch_direct(dtype, collective.fold.op, tables, streams);
  });
}

template <typename T>
void Group::launch_direct(DType dtype, ReduceOp op, T* tables, Streams streams) {
  const KernelKind kind =
      std::is_same_v<T, SmallTable> ? KernelKind::kDirectSmall : KernelKind::kDirectLarge;
  const void* kernel = kernel_function(dtype, op, kind);
  const std::vector<int>& most = devices_.most_blocks(kernel, kThreads);
  int num_blocks = 1;
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    num_blocks = std::max(num_blocks, static_cast<int>(tables[d].num_tiles));
  }
  num_blocks = std::max(
      1, std::min({num_blocks, kMaxWaitingBlocks, *std::min_element(most.begin(), most.end())}));
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    BarrierPorts ports = devices_[d].ports;
    Patience patience = devices_.patience(d);
    if (patience.withheld >= 0) {
      const int index = devices_.of_rank(static_cast<std::size_t>(patience.withheld));
      patience.withheld = static_cast<std::int32_t>(devices_.position_of(index));
    }
    const OnDevice guard(devices_[d].index);
    void* arguments[] = {&tables[d], &ports, &patience};
    check(cudaLaunchCooperativeKernel(kernel, dim3(static_cast<unsigned>(num_blocks)),
                                      dim3(kThreads), arguments, 0, streams[d]),
          "launch of direct", devices_[d].index);
  }
}

}  // namespace pyringar::cuda
