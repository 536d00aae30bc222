// devices: groups ranks by device, and orders streams by events.
#include "cuda/devices.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "core/error.h"
#include "cuda/peers.h"

namespace pyringar::cuda {

Devices::Devices(std::vector<int> of_rank) : of_rank_(std::move(of_rank)) {
  for (const int index : of_rank_) {
    if (index == kHost) {
      has_host_ranks_ = true;
    } else if (position_of(index) == indices_.size()) {
      indices_.push_back(index);
    }
  }
  if (indices_.empty()) fail(ErrorKind::kArgument, "no rank is on a CUDA device");
  {
    const auto launches = lock_launches();  // enable_peers() allocates memory and launches kernels
    for (const int a : indices_) {
      for (const int b : indices_) has_peers_ = has_peers_ && enable_peers(a, b);
    }
  }
  for (const int index : indices_) {
    const OnDevice guard(index);
    Device device{index, 0, {}};
    check(
        cudaDeviceGetAttribute(&device.num_multiprocessors, cudaDevAttrMultiProcessorCount, index),
        "cudaDeviceGetAttribute", index);
    for (int rank = 0; rank < world_size(); ++rank) {
      if (of_rank_[static_cast<std::size_t>(rank)] == index) device.ranks.push_back(rank);
    }
    devices_.push_back(std::move(device));
  }
}

std::size_t Devices::position_of(int index) const {
  return static_cast<std::size_t>(std::find(indices_.begin(), indices_.end(), index) -
                                  indices_.begin());
}

const std::vector<int>& Devices::most_blocks(const void* kernel, int threads) {
  const auto known = most_blocks_.find(kernel);
  if (known != most_blocks_.end()) return known->second;
  std::vector<int> blocks;
  for (const Device& device : devices_) {
    const OnDevice guard(device.index);
    const BesideCaptures beside;
    // Load the kernel now: a load synchronizes, and would deadlock with a running kernel that
    // waits.
    cudaFuncAttributes attributes{};
    check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes", device.index);
    int per_multiprocessor = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor", device.index);
    blocks.push_back(per_multiprocessor * device.num_multiprocessors);
  }
  return most_blocks_.emplace(kernel, std::move(blocks)).first->second;
}

Events::Events(std::vector<int> devices) : devices_(std::move(devices)) {
  for (const int device : devices_) events_.emplace_back(device);
}

void Events::record(Streams streams) {
  for (std::size_t d = 0; d < events_.size(); ++d) events_[d].record(streams[d]);
}

void Events::make_wait(Streams streams) const {
  for (std::size_t d = 0; d < events_.size(); ++d) {
    events_[d].make_wait(streams[d], devices_[d]);
  }
}

// All streams wait through stream 0: 2 (k - 1) waits for k streams instead of k (k - 1).
void Events::meet(Streams streams) {
  for (std::size_t d = 1; d < events_.size(); ++d) {
    events_[d].record(streams[d]);
    events_[d].make_wait(streams[0], devices_[0]);
  }
  events_[0].record(streams[0]);
  for (std::size_t d = 1; d < events_.size(); ++d) {
    events_[0].make_wait(streams[d], devices_[d]);
  }
}

bool Events::is_done() const {
  return std::all_of(events_.begin(), events_.end(),
                     [](const Event& event) { return event.is_done(); });
}

// Wait for all events, even after a failure. Raise the first failure.
void Events::wait_for() const {
  std::exception_ptr failure;
  for (const Event& event : events_) {
    try {
      event.wait_for();
    } catch (const Error&) {
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

Memory shared_memory(int device, bool is_reachable, std::size_t bytes) {
  return is_reachable ? device_memory(device, bytes) : host_memory(device, bytes);
}

}  // namespace pyringar::cuda
