// group: the ranks of one communicator on GPUs: one call after the other, on the devices' streams.
//
// Units     bytes, nanoseconds. A Collective borrows the tensors' memory; on return the work is
//           enqueued, not done, and tensors must live until it is.
// Contract  Work starts after what is on each device's stream, and the streams go on after it; the
//           host never waits, except for ranks in the host's memory.
//           One device: `fused` is one launch for everything that a kernel's arguments hold,
//           `direct` the same. Several: `direct` and `ring` are one launch per device and tensor
//           table; launches of one process that wait across devices follow each other in one order
//           on all devices, so that two communicators cannot wait for each other.
//           No allocation, host wait or lock on the device while a stream is captured; what a first
//           call allocates is refused there with the advice to call once before.
//           A kernel's failed wait is found by the next call: the group then refuses everything
//           with that reason. The devices stay usable.
// Threads   any; calls of one group run one at a time.
// Tests     tests/cpp/cuda_host/group_test.cpp, tests/cuda
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/collective.h"
#include "cuda/devices.h"
#include "cuda/ring_links.h"
#include "cuda/staging.h"

namespace pyringar::cuda {

class Group {
 public:
  // device_of_rank[r]: its index, or kHost.
  Group(std::vector<int> device_of_rank, std::chrono::nanoseconds timeout);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  const std::vector<int>& devices() const { return devices_.indices(); }  // each once
  bool has_host_ranks() const { return devices_.has_host_ranks(); }
  bool has_peers() const { return devices_.has_peers(); }

  // streams[i] belongs to devices()[i]. Tensors with gaps have been packed before.
  void run(const Collective& collective, Streams streams);

  void check_usable();
  GroupStats stats();
  void close();
  void withhold_rank(int rank);  // for tests: the rank's blocks leave at once; -1 for none

 private:
  void check_usable_locked();
  void enqueue(const Collective& collective, Streams streams, bool capturing);
  void run_tables(const Collective& collective, Streams streams);
  template <typename T>
  void launch_direct(DType dtype, ReduceOp op, T* tables, Streams streams);

  std::mutex mutex_;  // held while a call is enqueued; guards all below
  Devices devices_;
  Staging staging_;
  std::unique_ptr<RingLinks> ring_;
  bool is_closed_ = false;
  std::string failure_;
  const char* operation_ = "collective";  // the last one
  GroupStats stats_;
};

}  // namespace pyringar::cuda
