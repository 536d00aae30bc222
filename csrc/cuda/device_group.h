// group: the ranks of one communicator on GPUs: one call after the other, on the devices' streams.
//
// Units     bytes, nanoseconds. A Collective borrows the tensors' memory; on return the work is
//           enqueued, not done, and tensors must live until it is.
// Contract  Work starts after what is on each device's stream, and the streams go on after it. The
//           host waits only for ranks in the host's memory.
//           One device: `fused` and `direct` are one launch. Several: the streams meet, each device
//           folds its slice of every tensor, and the streams meet again; no kernel waits. `ring` is
//           one launch per device and tensor, whose blocks wait for each other; rings between
//           devices run one at a time in a process.
//           Captures: all streams are in one capture, or none. A captured call needs its tensors
//           alone: the graph may be replayed beside calls, and after close(). Rings, and calls that
//           need buffers (cuda/staging_buffers.h), cannot be captured.
//           A kernel's failed wait is raised by the next call, check_usable() or close(); the group
//           then refuses everything with that reason.
// Threads   any; calls of one group run one at a time. abort() waits for none of them.
// Tests     tests/cpp/cuda_host, tests/cuda
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/collective.h"
#include "cuda/device_ring.h"
#include "cuda/devices.h"
#include "cuda/folds.h"
#include "cuda/staging_buffers.h"

namespace pyringar::cuda {

class DeviceGroup {
 public:
  // device_of_rank[r]: its index, or kHost.
  DeviceGroup(std::vector<int> device_of_rank, std::chrono::nanoseconds timeout);
  ~DeviceGroup();

  const std::vector<int>& devices() const { return devices_.indices(); }  // each once
  bool has_host_ranks() const { return devices_.has_host_ranks(); }
  bool has_peers() const { return devices_.has_peers(); }

  // streams[i] belongs to devices()[i]. Tensors with gaps have been packed before.
  void run(const Collective& collective, Streams streams);

  void check_usable();
  bool try_check_usable();  // false, and nothing looked at, while another thread calls
  // What captures the streams; 0: nothing. Refuses where that is not the same for all of them.
  CaptureId check_captures(const Collective& collective, Streams streams) const;
  GroupStats stats();
  // Waits for calls that use memory of the group's own. Raises a failure that no call has raised.
  void close();
  // Kernels that wait leave, with anything in the tensors; every call raises from now on.
  void abort();
  void withhold_rank(int rank);  // for tests: the rank's blocks leave at once; -1 for none

 private:
  void check_usable_locked();
  std::string new_failure();
  void check_capturable(const Collective& collective) const;
  void check_ring() const;
  void run_ring(const Collective& collective, Streams streams);
  void run_staged(const Collective& collective, Streams streams);
  void run_tables(const Collective& collective, Streams streams, Events& meeting) const;
  void make_links();
  bool is_aborted();

  Devices devices_;
  const std::chrono::nanoseconds timeout_;

  std::mutex mutex_;  // held while a call is enqueued; guards all below
  std::unique_ptr<Events> meeting_;
  std::unique_ptr<Events> last_use_;  // of the memory of the next two
  std::unique_ptr<StagingBuffers> staging_;
  bool is_closed_ = false;
  std::string failure_;
  ErrorKind failure_kind_ = ErrorKind::kTimeout;
  const char* operation_ = "collective";  // the last one
  int withheld_rank_ = -1;
  GroupStats stats_;

  std::mutex abort_mutex_;  // never held for long; guards the next two, with the other for ring_
  bool is_aborted_ = false;
  std::unique_ptr<DeviceRing> ring_;  // made when it is needed
};

}  // namespace pyringar::cuda
