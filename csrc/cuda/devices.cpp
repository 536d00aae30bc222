// devices: who is where: the devices of a group, their barriers, what they report.
//
// Floor     cuda
// Tests     tests/cpp/cuda_host/group_test.cpp, tests/test_cuda.py

#include "cuda/group.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "cuda/peers.h"

namespace pyringar::cuda {

Group::Group(std::vector<int> place, std::chrono::nanoseconds timeout)
    : place_(std::move(place)), timeout_(timeout) {
  for (const int device : place_) {
    if (device == kHost) {
      has_host_ranks_ = true;
    } else if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
      devices_.push_back(device);
    }
  }
  if (devices_.empty()) fail(ErrorKind::kArgument, "no rank is on a CUDA device");
  if (devices_.size() > kMaxDevices) {
    fail(ErrorKind::kUnsupported, devices_.size(), " devices, supported are ", kMaxDevices);
  }
  for (const int a : devices_) {
    for (const int b : devices_) has_peers_ = has_peers_ && enable_peers(a, b);
  }
  const std::size_t barrier_flags = devices_.size() * kMaxWaitingBlocks;
  for (const int index : devices_) {
    const OnDevice guard(index);
    Device device{index,
                  0,
                  {},
                  device_memory(index, sizeof(std::uint32_t)),
                  host_memory(sizeof(Failure)),
                  device_memory(index, (barrier_flags + kMaxWaitingBlocks) * kFlagBytes),
                  {}};
    check(
        cudaDeviceGetAttribute(&device.num_multiprocessors, cudaDevAttrMultiProcessorCount, index),
        "cudaDeviceGetAttribute", index);
    for (int rank = 0; rank < world_size(); ++rank) {
      if (place_[static_cast<std::size_t>(rank)] == index) device.ranks.push_back(rank);
    }
    per_device_.push_back(std::move(device));
  }
  if (!has_peers_) {
    // Flags that no other device could reach lie in the host's memory.
    for (Device& device : per_device_) {
      device.barrier = host_memory((barrier_flags + kMaxWaitingBlocks) * kFlagBytes);
    }
  }
  for (std::size_t d = 0; d < per_device_.size(); ++d) {
    BarrierPorts& ports = per_device_[d].ports;
    ports.device = static_cast<std::int32_t>(d);
    ports.num_devices = static_cast<std::int32_t>(per_device_.size());
    ports.max_blocks = kMaxWaitingBlocks;
    ports.arrived = as<std::uint32_t>(per_device_[d].barrier);
    ports.count = as<std::uint32_t>(per_device_[d].barrier, barrier_flags * kFlagBytes);
    for (std::size_t peer = 0; peer < per_device_.size(); ++peer) {
      ports.arrived_there[peer] = as<std::uint32_t>(per_device_[peer].barrier);
    }
  }
  staging_.resize(place_.size());
  staging_bytes_.resize(place_.size());
  staging_on_host_.resize(place_.size());
}

// Without exceptions: a device that does not answer has nothing under way.
void Group::synchronize() const {
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess) return;
  for (const Device& device : per_device_) {
    if (cudaSetDevice(device.index) == cudaSuccess) cudaDeviceSynchronize();
  }
  cudaSetDevice(before);
}

std::string Group::describe_failure(const Failure& failure) const {
  const double seconds = std::chrono::duration<double>(timeout_).count();
  const std::string progress = join(" (", failure.seen, " of ", failure.wanted, ")");
  if (failure.what == Awaited::kBarrier) {
    return join(operation_, ": cuda:", devices_[static_cast<std::size_t>(failure.rank)], " waited ",
                seconds, " s for cuda:", devices_[static_cast<std::size_t>(failure.peer)], " to ",
                failure.step == 0 ? "begin" : "end", progress);
  }
  const auto device_of = [&](int rank) { return place_[static_cast<std::size_t>(rank)]; };
  return join(operation_, ": rank ", failure.rank, " (cuda:", device_of(failure.rank), ") waited ",
              seconds, " s for rank ", failure.peer, " (cuda:", device_of(failure.peer), ") to ",
              failure.what == Awaited::kMessage ? "send" : "receive", " at step ", failure.step,
              " of ", ring_num_steps(world_size()), progress);
}

std::size_t Group::index_of(int device) const {
  return static_cast<std::size_t>(std::find(devices_.begin(), devices_.end(), device) -
                                  devices_.begin());
}

Patience Group::patience(std::size_t device) const {
  const Device& d = per_device_[device];
  return {static_cast<std::uint64_t>(timeout_.count()), as<std::uint32_t>(d.gave_up),
          as<Failure>(d.failure), withheld_rank_};
}

// On every device, so that no kernel is loaded while another device's already waits for it.
const std::vector<int>& Group::most_blocks(const void* kernel, int threads) {
  const auto known = most_blocks_.find(kernel);
  if (known != most_blocks_.end()) return known->second;
  std::vector<int> blocks;
  for (const Device& device : per_device_) {
    const OnDevice guard(device.index);
    int per_multiprocessor = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor", device.index);
    blocks.push_back(per_multiprocessor * device.num_multiprocessors);
  }
  return most_blocks_.emplace(kernel, std::move(blocks)).first->second;
}

}  // namespace pyringar::cuda
