// devices: the device of each rank, and events that order the streams of all devices.
//
// Contract  A communicator's devices never change. meet() and make_wait() make streams wait for
//           recorded events. The host does not wait.
// Threads   const functions: any. All others: one at a time.
// Tests     tests/cpp/cuda_host
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <vector>

#include "core/collective.h"
#include "cuda/runtime.h"

namespace pyringar::cuda {

// one stream per device, in the order of Devices
using Streams = std::span<const cudaStream_t>;

struct Device {
  int index;
  int num_multiprocessors;
  std::vector<int> ranks;
};

class Devices {
 public:
  // of_rank[r]: device index of rank r, or kHost.
  explicit Devices(std::vector<int> of_rank);

  int world_size() const { return static_cast<int>(of_rank_.size()); }
  int of_rank(std::size_t rank) const { return of_rank_[rank]; }
  const std::vector<int>& indices() const { return indices_; }  // without duplicates
  std::size_t position_of(int index) const;                     // index into indices()
  bool has_host_ranks() const { return has_host_ranks_; }
  bool has_peers() const { return has_peers_; }

  std::size_t size() const { return devices_.size(); }
  const Device& operator[](std::size_t d) const { return devices_[d]; }
  // Load the kernel and return how many of its blocks fit on each device at once.
  const std::vector<int>& most_blocks(const void* kernel, int threads);

 private:
  const std::vector<int> of_rank_;
  std::vector<int> indices_;
  bool has_host_ranks_ = false;
  bool has_peers_ = true;
  std::vector<Device> devices_;
  std::map<const void*, std::vector<int>> most_blocks_;  // by kernel
};

// One event per device. Each captured call needs new Events; other calls reuse one object.
class Events {
 public:
  explicit Events(std::vector<int> devices);  // devices: without duplicates

  void record(Streams streams);
  void make_wait(Streams streams) const;  // stream d waits for event d
  void meet(Streams streams);             // every stream waits for all streams
  bool is_done() const;                   // invalid for events recorded in a capture
  void wait_for() const;                  // blocks the host until the last record has run

 private:
  std::vector<int> devices_;
  std::vector<Event> events_;
};

// Allocate on the device if is_reachable (by its peers), else in pinned host memory.
Memory shared_memory(int device, bool is_reachable, std::size_t bytes);

}  // namespace pyringar::cuda
