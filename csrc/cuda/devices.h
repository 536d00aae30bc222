// devices: which device each rank is on, and in which order the devices' streams go on.
//
// Contract  What a Group tells of its devices never changes. meet() orders all streams after all;
//           nothing waits but streams, for events that are recorded already.
// Threads   any for what is const; the rest one at a time.
// Tests     tests/cpp/cuda_host
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <vector>

#include "core/collective.h"
#include "cuda/runtime.h"

namespace pyringar::cuda {

using Streams = std::span<const cudaStream_t>;  // one per device, in the order of Devices

struct Device {
  int index;
  int num_multiprocessors;
  std::vector<int> ranks;
};

class Devices {
 public:
  // of_rank[r]: the index of rank r's device, or kHost.
  explicit Devices(std::vector<int> of_rank);

  int world_size() const { return static_cast<int>(of_rank_.size()); }
  int of_rank(std::size_t rank) const { return of_rank_[rank]; }
  const std::vector<int>& indices() const { return indices_; }  // each once
  std::size_t position_of(int index) const;                     // in indices()
  bool has_host_ranks() const { return has_host_ranks_; }
  bool has_peers() const { return has_peers_; }

  std::size_t size() const { return devices_.size(); }
  const Device& operator[](std::size_t d) const { return devices_[d]; }
  // Blocks of a kernel that fit on each device at once. It is loaded there from then on.
  const std::vector<int>& most_blocks(const void* kernel, int threads);

 private:
  const std::vector<int> of_rank_;
  std::vector<int> indices_;
  bool has_host_ranks_ = false;
  bool has_peers_ = true;
  std::vector<Device> devices_;
  std::map<const void*, std::vector<int>> most_blocks_;  // by kernel
};

// An event on each device, used again and again; a capture needs its own.
class Events {
 public:
  explicit Events(std::vector<int> devices);  // each once

  void record(Streams streams);
  void make_wait(Streams streams) const;  // each for its own device's
  void meet(Streams streams);             // every stream goes on after all of them
  bool is_done() const;                   // not for what a capture recorded
  void wait_for() const;                  // on the host, for what was recorded last

 private:
  std::vector<int> devices_;
  std::vector<Event> events_;
};

// On the device if the others reach it there, else in the host's memory.
Memory shared_memory(int device, bool is_reachable, std::size_t bytes);

}  // namespace pyringar::cuda
