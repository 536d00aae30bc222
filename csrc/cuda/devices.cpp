// devices: see the header.
//
// Tests     tests/cpp/cuda_host/group_test.cpp

#include "cuda/devices.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/ring_program.h"
#include "cuda/peers.h"

namespace pyringar::cuda {

Devices::Devices(std::vector<int> of_rank, std::chrono::nanoseconds timeout)
    : of_rank_(std::move(of_rank)), timeout_(timeout) {
  for (const int index : of_rank_) {
    if (index == kHost) {
      has_host_ranks_ = true;
    } else if (position_of(index) == indices_.size()) {
      indices_.push_back(index);
    }
  }
  if (indices_.empty()) fail(ErrorKind::kArgument, "no rank is on a CUDA device");
  if (indices_.size() > kMaxDevices) {
    fail(ErrorKind::kUnsupported, indices_.size(), " devices, supported are ", kMaxDevices);
  }
  for (const int a : indices_) {
    for (const int b : indices_) has_peers_ = has_peers_ && enable_peers(a, b);
  }
  for (const int index : indices_) devices_.push_back(make_device(index));
  wire_barriers();
}

Device Devices::make_device(int index) const {
  const OnDevice guard(index);
  const std::size_t flags = (indices_.size() + 1) * kMaxWaitingBlocks;
  Device device{index,
                0,
                {},
                device_memory(index, sizeof(std::uint32_t)),
                host_memory(sizeof(Failure)),
                shared_memory(index, has_peers_, flags * kFlagBytes),
                {}};
  check(cudaDeviceGetAttribute(&device.num_multiprocessors, cudaDevAttrMultiProcessorCount, index),
        "cudaDeviceGetAttribute", index);
  for (int rank = 0; rank < world_size(); ++rank) {
    if (of_rank_[static_cast<std::size_t>(rank)] == index) device.ranks.push_back(rank);
  }
  return device;
}

void Devices::wire_barriers() {
  const std::size_t count_at = indices_.size() * kMaxWaitingBlocks * kFlagBytes;
  for (std::size_t d = 0; d < size(); ++d) {
    BarrierPorts& ports = devices_[d].ports;
    ports.device = static_cast<std::int32_t>(d);
    ports.num_devices = static_cast<std::int32_t>(size());
    ports.max_blocks = kMaxWaitingBlocks;
    ports.arrived = as<std::uint32_t>(devices_[d].barrier);
    ports.count = as<std::uint32_t>(devices_[d].barrier, count_at);
    for (std::size_t peer = 0; peer < size(); ++peer) {
      ports.arrived_there[peer] = as<std::uint32_t>(devices_[peer].barrier);
    }
  }
}

void Devices::release() { devices_.clear(); }

std::size_t Devices::position_of(int index) const {
  return static_cast<std::size_t>(std::find(indices_.begin(), indices_.end(), index) -
                                  indices_.begin());
}

// On every device, so that no kernel is loaded while another device's already waits for it.
const std::vector<int>& Devices::most_blocks(const void* kernel, int threads) {
  const auto known = most_blocks_.find(kernel);
  if (known != most_blocks_.end()) return known->second;
  std::vector<int> blocks;
  for (const Device& device : devices_) {
    const OnDevice guard(device.index);
    int per_multiprocessor = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor", device.index);
    blocks.push_back(per_multiprocessor * device.num_multiprocessors);
  }
  return most_blocks_.emplace(kernel, std::move(blocks)).first->second;
}

Patience Devices::patience(std::size_t d) const {
  return {static_cast<std::uint64_t>(timeout_.count()), as<std::uint32_t>(devices_[d].gave_up),
          as<Failure>(devices_[d].failure), withheld_rank_};
}

// Without exceptions: a device that does not answer has nothing under way.
void Devices::synchronize() const {
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess) return;
  for (const Device& device : devices_) {
    if (cudaSetDevice(device.index) == cudaSuccess) cudaDeviceSynchronize();
  }
  cudaSetDevice(before);
}

// Who waits for the earliest step waits for the culprit; the others wait for that rank.
const Failure* Devices::earliest_failure() const {
  const auto turn = [](const Failure* f) { return std::pair(f->step, f->what); };
  const Failure* earliest = nullptr;
  for (const Device& device : devices_) {
    const auto* failure = as<const Failure>(device.failure);
    if (__atomic_load_n(&failure->is_set, __ATOMIC_ACQUIRE) == 0) continue;
    if (earliest == nullptr || turn(failure) < turn(earliest)) earliest = failure;
  }
  return earliest;
}

std::string Devices::describe(const Failure& failure, const char* operation) const {
  const double seconds = std::chrono::duration<double>(timeout_).count();
  const std::string progress = join(" (", failure.seen, " of ", failure.wanted, ")");
  if (failure.what == Awaited::kBarrier) {
    return join(operation, ": cuda:", indices_[static_cast<std::size_t>(failure.rank)], " waited ",
                seconds, " s for cuda:", indices_[static_cast<std::size_t>(failure.peer)], " to ",
                failure.step == 0 ? "begin" : "end", progress);
  }
  const auto name_of = [&](int rank) {
    return join("rank ", rank, " (cuda:", of_rank_[static_cast<std::size_t>(rank)], ")");
  };
  return join(operation, ": ", name_of(failure.rank), " waited ", seconds, " s for ",
              name_of(failure.peer), " to ", failure.what == Awaited::kMessage ? "send" : "receive",
              " at step ", failure.step, " of ", ring_num_steps(world_size()), progress);
}

Memory shared_memory(int device, bool is_reachable, std::size_t bytes) {
  return is_reachable ? device_memory(device, bytes) : host_memory(bytes);
}

void check_may_allocate(bool capturing, const char* operation) {
  if (!capturing) return;
  fail(ErrorKind::kState, operation,
       ": the first call of this kind allocates memory, which a CUDA graph cannot capture; call it "
       "once with these sizes before the capture begins");
}

}  // namespace pyringar::cuda
