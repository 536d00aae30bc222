// group: one rank of a group of processes, its tensors on a GPU: it moves the data, and
// process/group meets the other ranks.
//
// Units     bytes, nanoseconds. A call borrows the tensors' memory until the stream has run it.
// Contract  That of process/group. A call returns once it is enqueued, after the work on its
//           stream. Streams under capture are refused. All enqueued work ends
//           (cuda_process/device_watch). If it ended without the data of a lost rank, the next
//           call, the call's work or close() raises, once.
//           close() waits for this rank's GPU while any rank makes progress within the timeout.
//           Slots that other ranks may still read are freed when this process makes or closes
//           another group.
// Threads   any thread may call; calls run one at a time, in the order in which they came.
// Tests     tests/cpp/cuda_processes, tests/test_cuda_processes.py
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>

#include "cuda_process/staging.h"
#include "process/process_group.h"

namespace pyringar {

// Sizes that were not measured yet.
struct CudaProcessOptions {
  std::chrono::nanoseconds timeout{};
  OnNap on_nap = &ignore_naps;
  // Large enough that a piece takes longer than the dozen calls which enqueue it.
  std::size_t slot_bytes = std::size_t{16} << 20;
  // Of ranks that share a GPU: there a piece costs turns of all their processes.
  std::size_t most_shared_slot_bytes = std::size_t{64} << 20;
  std::size_t exchange_bytes = 256 * 1024;  // up to this, every rank reduces everything
};

class CudaProcessGroup {
 public:
  // As ProcessGroup; the device's part begins with connect().
  CudaProcessGroup(SharedMemory memory, const Segment& segment, int rank, int device,
                   CudaProcessOptions options);
  ~CudaProcessGroup();

  // Shows slots to the others, and tries theirs. What does not work on one rank is raised on all.
  void connect();

  ProcessGroup& host() { return *host_; }
  int device() const { return device_; }

  // Collective's spans are of the device's memory here; nothing is packed.
  void run(const Collective& call, cudaStream_t stream);

  // A call on a stream of the group's own, after what is on `after` now.
  struct Submitted {
    std::shared_ptr<Work> enqueued;  // none: it is already
    // They mean something once it is enqueued.
    std::shared_ptr<const cuda::Event> done;
    std::shared_ptr<std::uint32_t> last;  // message of the call
  };
  Submitted submit(Collective call, cudaStream_t after);
  // The same for the calls that were made on `stream` and have returned.
  Submitted enqueued(cudaStream_t stream);
  // Why a call was not enqueued, or has ended, or will end, without all of its data; null: neither.
  std::exception_ptr failure_of(const Submitted& work);

  ProcessStats stats();                       // busy_ns: of the host
  ProcessPlan plan(std::size_t bytes) const;  // of an all_reduce
  std::size_t slot_bytes() const { return plan_.slot_bytes; }
  // Throws, once, that a call which had returned ended without its data.
  void raise_untold();
  // As ProcessGroup's; false, too, as long as the GPU is not done: tensors of calls must stay.
  bool close(CloseMode mode = CloseMode::kAfterCalls);

 private:
  struct Outcome;

  static std::vector<cuda::StagingHandles> handles_of(const std::vector<Outcome>& all);
  void exchange(const Outcome& own, std::vector<Outcome>& all);
  void raise_first(const Outcome& own, const std::vector<Outcome>& all) const;
  bool enqueue(const Collective& call, ProcessRank& self, cudaStream_t stream);
  void release_streams();
  void release(CloseMode mode);
  Error void_error() const;
  void check_not_captured(const Collective& call, cudaStream_t stream) const;
  void check_connected() const;
  bool wait_until_idle(std::chrono::nanoseconds patience) const;

  const int device_;
  const CudaProcessOptions options_;
  cuda::StagingPlan plan_{false, options_.slot_bytes};  // final once connected
  std::shared_ptr<ProcessGroup> host_;
  std::shared_ptr<cuda::OwnStaging> own_;
  std::unique_ptr<cuda::Stream> stream_;  // of asynchronous calls

  std::mutex staging_mutex_;                       // held while a call is enqueued
  std::unique_ptr<cuda::ProcessStaging> staging_;  // none once closed

  std::mutex abort_mutex_;                           // never held for long
  const cuda::ProcessStaging* abortable_ = nullptr;  // none before connect() and once closed

  CallLock close_lock_;
  bool is_closed_ = false;
  std::atomic<std::uint32_t> last_;    // message of the last call that was enqueued
  std::atomic<bool> has_told_{false};  // of a failure
  std::mutex stats_mutex_;
  ProcessStats stats_;
};

}  // namespace pyringar
