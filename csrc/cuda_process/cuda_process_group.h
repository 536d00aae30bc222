// cuda_process_group: one rank of a group of processes, with its tensors on a GPU. ProcessGroup
// synchronizes the hosts.
//
// Units     bytes, nanoseconds. A call borrows the tensors' memory until the stream has run it.
// Contract  As ProcessGroup. run() returns when the call is enqueued. Captured streams are refused.
//           All enqueued work ends, even if a rank is lost (cuda_process/device_watch.h). If a call
//           ended without a lost rank's data, the next call, its work or close() raises once.
//           close() waits for the GPU while any rank makes progress within the timeout. Slots that
//           other ranks may still read are freed when this process makes or closes another group.
// Threads   any. Calls run one at a time, in the order of arrival.
// Tests     tests/cpp/cuda_processes, tests/test_cuda_processes.py
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>

#include "cuda_process/process_staging.h"
#include "process/process_group.h"

namespace pyringar {

// Options of a group. The sizes are chosen without measurements.
struct CudaProcessOptions {
  std::chrono::nanoseconds timeout{};
  OnNap on_nap = &ignore_naps;
  // Moving a piece of this size takes longer than the dozen CUDA calls that enqueue it.
  std::size_t slot_bytes = std::size_t{16} << 20;
  // Largest slots of ranks that share a GPU, which switches between all processes for each piece.
  std::size_t most_shared_slot_bytes = std::size_t{64} << 20;
  std::size_t exchange_bytes = 256 * 1024;  // up to this size every rank reduces all slices
};

class CudaProcessGroup {
 public:
  // Arguments as for ProcessGroup. connect() prepares the GPU.
  CudaProcessGroup(SharedMemory memory, const Segment& segment, int rank, int device,
                   CudaProcessOptions options);
  ~CudaProcessGroup();

  // Map the other ranks' slots and test them. A failure on one rank is raised on all ranks.
  void connect();

  ProcessGroup& host() { return *host_; }
  int device() const { return device_; }

  // `call` points to device memory, and has no packed tensors.
  void run(const Collective& call, cudaStream_t stream);

  // Result of submit(), which runs a call on the group's stream after the work now on `after`.
  struct Submitted {
    std::shared_ptr<Work> enqueued;  // null: the call is enqueued already
    // `done` is valid once the call is enqueued.
    std::shared_ptr<const cuda::Event> done;
    std::shared_ptr<std::uint32_t> last;  // last message of the call
  };
  Submitted submit(Collective call, cudaStream_t after);
  // Return a Submitted for all calls on `stream` that have returned.
  Submitted enqueued(cudaStream_t stream);
  // Return why the call was not enqueued, or why its results are undefined. Null: no failure.
  std::exception_ptr failure_of(const Submitted& work);

  ProcessStats stats();                       // busy_ns: time on the host, not on the GPU
  ProcessPlan plan(std::size_t bytes) const;  // for an all_reduce of this size
  std::size_t slot_bytes() const { return plan_.slot_bytes; }
  // Raise, once, if an enqueued call ended without a lost rank's data.
  void raise_unreported();
  // Close as ProcessGroup::close() does. False also if the GPU still runs calls: the caller must
  // keep their tensors.
  bool close(CloseMode mode = CloseMode::kAfterCalls);

 private:
  struct ConnectStatus;

  static std::vector<cuda::StagingHandles> handles_of(const std::vector<ConnectStatus>& all);
  void exchange(const ConnectStatus& own, std::vector<ConnectStatus>& all);
  void raise_first(const ConnectStatus& own, const std::vector<ConnectStatus>& all) const;
  bool enqueue(const Collective& call, ProcessRank& self, cudaStream_t stream);
  void release_streams();
  void release(CloseMode mode);
  Error void_error() const;
  void check_not_captured(const Collective& call, cudaStream_t stream) const;
  void check_connected() const;
  bool wait_until_idle(std::chrono::nanoseconds patience) const;

  const int device_;
  const CudaProcessOptions options_;
  cuda::StagingPlan plan_{false, options_.slot_bytes};  // final after connect()
  std::shared_ptr<ProcessGroup> host_;
  std::shared_ptr<cuda::LocalSlots> own_;
  std::unique_ptr<cuda::Stream> stream_;  // stream of asynchronous calls

  std::mutex staging_mutex_;                       // held while a call is enqueued
  std::unique_ptr<cuda::ProcessStaging> staging_;  // null after close()

  std::mutex abort_mutex_;                           // guards abortable_; held briefly
  const cuda::ProcessStaging* abortable_ = nullptr;  // null before connect() and after close()

  CallLock close_lock_;
  bool is_closed_ = false;
  std::atomic<std::uint32_t> last_;        // last message of the last enqueued call
  std::atomic<bool> has_reported_{false};  // a call or work has raised a peer's failure
  std::mutex stats_mutex_;
  ProcessStats stats_;
};

}  // namespace pyringar
