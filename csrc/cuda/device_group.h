// device_group: the ranks of one communicator on GPUs, whose calls run on the devices' streams.
//
// Units     bytes, nanoseconds. run() returns when the call is enqueued. Its tensors must live
//           until the streams have run it.
// Contract  The host waits only for ranks in host memory. `fused` is one launch. `direct` folds one
//           slice of every tensor per device. Before and after, all streams wait for each other.
//           `ring` is one launch per device and tensor, whose blocks wait for each other. Rings
//           between devices run one at a time in a process. All streams are in one capture, or none
//           is. A captured call uses no memory of the group, so its graph may be replayed during
//           other calls and after close(). Rings and calls with staging buffers cannot be captured.
//           The next run(), check_usable() or close() raises a kernel's timeout. The group then
//           refuses every call with that reason.
// Threads   any. Calls of one group run one at a time. abort() does not wait for them.
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
  DeviceGroup(std::vector<int> device_of_rank, std::chrono::nanoseconds timeout);
  ~DeviceGroup();

  const std::vector<int>& devices() const { return devices_.indices(); }  // without duplicates
  bool has_host_ranks() const { return devices_.has_host_ranks(); }
  bool has_peers() const { return devices_.has_peers(); }

  // streams[i] belongs to devices()[i]. The caller packs tensors that have gaps.
  void run(const Collective& collective, Streams streams);

  void check_usable();
  bool try_check_usable();  // returns false without a check while another thread holds the lock
  // Return the capture that all streams are in, or 0. Raise if the streams differ.
  CaptureId check_captures(const Collective& collective, Streams streams) const;
  GroupStats stats();
  // Wait for calls that use the group's memory. Raise a kernel's failure that no call has raised.
  void close();
  // End waiting kernels, whose results are undefined. Every later call raises.
  void abort();
  void withhold_rank(int rank);  // for tests: the rank's blocks exit at once; -1: all ranks run

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

  std::mutex mutex_;  // held while a call is enqueued; guards the members below
  std::unique_ptr<Events> meeting_;
  std::unique_ptr<Events> last_use_;  // ends of the last calls that used ring_ or staging_
  std::unique_ptr<StagingBuffers> staging_;
  bool is_closed_ = false;
  std::string failure_;
  ErrorKind failure_kind_ = ErrorKind::kTimeout;
  const char* operation_ = "collective";  // name of the last call
  int withheld_rank_ = -1;
  GroupStats stats_;

  std::mutex abort_mutex_;  // held briefly; guards is_aborted_; ring_ changes under both mutexes
  bool is_aborted_ = false;
  std::unique_ptr<DeviceRing> ring_;  // made by the first ring call
};

}  // namespace pyringar::cuda
