// devices: which device each rank is on, what launches on several devices share, and the failures
// that kernels report.
//
// Contract  a barrier's flags lie on the devices if all reach each other, else in the host's
//           memory. A failure stays until the group ends.
// Threads   one at a time, but indices(), which never changes.
// Tests     tests/cpp/cuda_host/group_test.cpp
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/collective.h"
#include "cuda/args.h"
#include "cuda/runtime.h"

namespace pyringar::cuda {

// Blocks that wait for other devices must all be on the device at once.
inline constexpr int kMaxWaitingBlocks = 512;
inline constexpr std::size_t kFlagBytes = kFlagStride * sizeof(std::uint32_t);

using Streams = std::span<const cudaStream_t>;  // one per device, in the order of Devices

struct Device {
  int index;
  int num_multiprocessors;
  std::vector<int> ranks;
  Memory gave_up;  // one word
  Memory failure;  // in the host's memory
  Memory barrier;  // arrived[from][block], then count[block]
  BarrierPorts ports;
};

class Devices {
 public:
  // of_rank[r]: the index of rank r's device, or kHost.
  Devices(std::vector<int> of_rank, std::chrono::nanoseconds timeout);
  void release();  // memory; only the constant answers are right from then on

  int world_size() const { return static_cast<int>(of_rank_.size()); }
  int of_rank(std::size_t rank) const { return of_rank_[rank]; }
  const std::vector<int>& indices() const { return indices_; }  // each once
  std::size_t position_of(int index) const;                     // in indices()
  bool has_host_ranks() const { return has_host_ranks_; }
  bool has_peers() const { return has_peers_; }

  std::size_t size() const { return devices_.size(); }
  const Device& operator[](std::size_t d) const { return devices_[d]; }
  // Blocks of a kernel that fit on each device at once.
  const std::vector<int>& most_blocks(const void* kernel, int threads);
  Patience patience(std::size_t d) const;
  void withhold_rank(int rank) { withheld_rank_ = rank; }
  void synchronize() const;

  // Of the rank that waited for the culprit; none: nullptr.
  const Failure* earliest_failure() const;
  std::string describe(const Failure& failure, const char* operation) const;

 private:
  Device make_device(int index) const;
  void wire_barriers();

  const std::vector<int> of_rank_;
  const std::chrono::nanoseconds timeout_;
  std::vector<int> indices_;
  bool has_host_ranks_ = false;
  bool has_peers_ = true;
  int withheld_rank_ = -1;
  std::vector<Device> devices_;
  std::map<const void*, std::vector<int>> most_blocks_;  // by kernel
};

// Where another device reads or writes it: on the device if it can be reached there, else in the
// host's memory.
Memory shared_memory(int device, bool is_reachable, std::size_t bytes);

// What a call allocates it cannot allocate while it is captured in a graph.
void check_may_allocate(bool capturing, const char* operation);

}  // namespace pyringar::cuda
