// group: the ranks of one communicator on GPUs: who is where, what stages what, and the launches.
//
// Floor     cuda: host.
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
// Tests     tests/cpp/cuda_host/group_test.cpp, tests/test_cuda.py
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/collective.h"
#include "core/error.h"
#include "cuda/args.h"
#include "cuda/runtime.h"

namespace pyringar::cuda {

inline constexpr int kHost = -1;  // in place of a device's index
// Blocks that wait for other devices must all be on the device at once.
inline constexpr int kMaxWaitingBlocks = 512;
inline constexpr std::size_t kFlagBytes = kFlagStride * sizeof(std::uint32_t);

[[noreturn]] void refuse_in_capture(const char* operation);

class Group {
 public:
  // place[r]: the device of rank r, or kHost.
  Group(std::vector<int> place, std::chrono::nanoseconds timeout);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int world_size() const { return static_cast<int>(place_.size()); }
  const std::vector<int>& devices() const { return devices_; }  // each once
  bool has_host_ranks() const { return has_host_ranks_; }
  bool has_peers() const { return has_peers_; }

  // streams[i] belongs to devices()[i]. Tensors with gaps have been packed before.
  void run(const Collective& collective, std::span<const cudaStream_t> streams);

  void check_usable();
  GroupStats stats();
  void close();
  void withhold_rank(int rank);  // for tests: the rank's blocks leave at once; -1 for none

 private:
  struct Device {
    int index;
    int num_multiprocessors;
    std::vector<int> ranks;
    Memory gave_up;  // one word
    Memory failure;  // in the host's memory
    Memory barrier;  // arrived[from][block], then count[block]
    BarrierPorts ports{};
  };
  struct Ring {
    int num_channels;
    std::uint32_t num_slots;
    std::uint32_t slot_bytes;
    std::vector<Memory> slots;  // by reading rank
    std::vector<Memory> flags;  // by reading rank
    std::vector<Memory> taken;  // by writing rank
    std::vector<Memory> bases;  // by rank
    std::vector<Memory> ports;  // by device
  };

  void check_usable_locked();
  void run_tables(const Collective& collective, std::span<const cudaStream_t> streams);
  template <typename T>
  void launch_tables(const Collective& collective, DType dtype,
                     std::span<const cudaStream_t> streams);
  template <typename T>
  void launch_table(const T& table, DType dtype, ReduceOp op, std::size_t device, int num_blocks,
                    cudaStream_t stream);
  const std::vector<int>& most_blocks(const void* kernel, int threads);
  Patience patience(std::size_t device) const;

  Collective staged(const Collective& collective, std::span<const cudaStream_t> streams);
  void unstage(const Collective& original, const Collective& staged,
               std::span<const cudaStream_t> streams);
  bool needs_staging(const Collective& collective) const;
  void reserve_staging(std::size_t rank, std::size_t bytes, bool on_host, bool capturing);

  void prepare_ring(bool capturing);
  void run_ring(const Buffers& tensor, Fold fold, std::span<const cudaStream_t> streams);

  void synchronize() const;
  std::string describe_failure(const Failure& failure) const;
  std::size_t index_of(int device) const;

  const std::vector<int> place_;
  const std::chrono::nanoseconds timeout_;
  std::vector<int> devices_;
  bool has_host_ranks_ = false;
  bool has_peers_ = true;
  std::mutex mutex_;
  ErrorKind broken_kind_ = ErrorKind::kState;
  std::string broken_;
  const char* operation_ = "collective";
  int withheld_rank_ = -1;
  GroupStats stats_;
  std::vector<Device> per_device_;
  std::map<const void*, std::vector<int>> most_blocks_;  // co-resident, by kernel and device
  std::vector<Memory> staging_;                          // by rank
  std::vector<std::size_t> staging_bytes_;
  std::vector<bool> staging_on_host_;
  std::unique_ptr<Ring> ring_;
};

}  // namespace pyringar::cuda
