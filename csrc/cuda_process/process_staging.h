// process_staging: slots on GPUs that other processes map, and words by which the streams of all
// ranks wait for each other.
//
// Units     bytes. Message n is in slot n % kStagingSlots, see core/staged_program.h.
// Contract  Every rank allocates its slots, since torch memory cannot be exported.
//           Its streams write the words of its DeviceLine (cuda_process/device_watch.h), and the
//           other ranks' streams wait for them. Ranks only read each other's slots, and unmap them
//           before the owner frees them.
//
//           No deadlock: a rank enqueues the write of a word, then sets its host counter. The other
//           hosts wait for that counter before they enqueue a wait for the word. So every write is
//           enqueued before all waits for it, and the oldest pending entry can always run. This
//           holds for any number of groups and threads, for one hardware queue, and for shared
//           GPUs.
//
//           No early reuse of a slot: copy_in(n) comes after this stream's waits for message n - 2
//           of all ranks: `reduced` in a direct call, `announced` in an exchange. The owner writes
//           `reduced` after all its reads of n - 3, and `announced` after those of n - 4.
//           StagedCall keeps each rank's calls in stream order.
// Threads   one at a time; is_idle(), progress(), abort(), last() any.
// Source    CUDA Driver API, Stream Memory Operations
// Tests     tests/cpp/cuda_processes, tests/test_cuda_processes.py
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/staged_program.h"
#include "cuda/runtime.h"
#include "cuda_process/device_watch.h"

namespace pyringar::cuda {

using Word = std::atomic<std::uint32_t>;

// Host memory whose 32-bit words streams write and wait for. write_word: the word changes when all
// earlier work of the stream is visible everywhere. await_word: the stream continues when
// (int32_t)(*addr - value) >= 0. The host may write words to end waits for a lost rank.
// Unsupported operations raise kUnsupported. Any thread.
class RegisteredMemory {
 public:
  // device: its streams access the words. memory: whole pages, which the caller keeps mapped.
  RegisteredMemory(int device, void* memory, std::size_t bytes);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  void write_word(const Word& word, std::uint32_t value, cudaStream_t stream) const;
  void await_word(const Word& word, std::uint32_t value, cudaStream_t stream) const;

 private:
  std::uintptr_t on_device(const Word& word) const;

  const int device_;
  void* const memory_;
  std::uintptr_t device_memory_ = 0;  // address of the memory on the device
};

// Divisor: the slots of all ranks take at most this fraction of the GPU's free memory.
inline constexpr std::size_t kPartOfFree = 16;

// Data that each rank sends to all other ranks. Trivially copyable, for an all-gather.
struct StagingHandles {
  std::array<char, 16> gpu;  // PCI bus id: the same name in every process
  std::uint64_t free_bytes;  // free memory of this GPU
  cudaIpcMemHandle_t slots;
};

StagingHandles describe_gpu(int device);

struct StagingPlan {
  bool shares_gpu;  // all ranks use one GPU
  std::size_t slot_bytes;
};
StagingPlan plan_staging(std::span<const StagingHandles> all, std::size_t slot_bytes,
                         std::size_t most_shared_bytes);

struct LocalSlots {
  LocalSlots(int device, const StagingPlan& plan);

  const int device;
  const StagingPlan plan;
  const Memory slots;
};

class ProcessStaging {
 public:
  // own, segment, host: must outlive this object. all[r]: handles of rank r; all[rank] is unused.
  ProcessStaging(const LocalSlots& own, const pyringar::Segment& segment, int rank,
                 const PeerWatch& host, std::span<const StagingHandles> all);

  // Each rank writes a probe. After a barrier, check_probes() returns an error text or "".
  void write_probe();
  std::string check_probes();

  int device() const { return own_.device; }
  const StagingPlan& plan() const { return own_.plan; }
  std::byte* slot(int rank, std::uint32_t message) const {
    return bases_[static_cast<std::size_t>(rank)] + message % kStagingSlots * own_.plan.slot_bytes;
  }

  void write_announced(std::uint32_t message, cudaStream_t stream) const {
    words_.write_word(line(rank_).announced.value, message, stream);
  }
  void await_announced(std::uint32_t message, cudaStream_t stream) const {
    watch_->expect_announced(message);
    for (const Peer& peer : peers_) {
      words_.await_word(line(peer.rank).announced.value, message, stream);
    }
  }
  void write_reduced(std::uint32_t message, cudaStream_t stream) const {
    words_.write_word(line(rank_).reduced.value, message, stream);
    last_reduced_ = message;
  }
  void await_reduced(std::uint32_t message, cudaStream_t stream) const {
    watch_->expect_reduced(message);
    for (const Peer& peer : peers_) {
      words_.await_word(line(peer.rank).reduced.value, message, stream);
    }
  }

  bool is_idle() const { return watch_->is_idle(); }
  // True if the device has failed, so that it runs nothing.
  bool has_failed() const;
  std::uint64_t progress() const { return watch_->progress(); }
  std::uint32_t last() const { return watch_->last(); }
  void abort() const { watch_->abort(); }

 private:
  friend class StagedCall;

  struct Peer {
    int rank;
    Memory slots;
  };

  DeviceLine& line(int rank) const { return segment_.device(rank); }
  Peer open(int rank, const StagingHandles& theirs) const;

  const LocalSlots& own_;
  const pyringar::Segment& segment_;
  const int rank_;
  const RegisteredMemory words_;
  std::vector<Peer> peers_;
  std::vector<std::byte*> bases_;  // by rank
  mutable std::uint32_t last_reduced_;
  const Stream probe_stream_;
  const Event last_call_;
  const std::unique_ptr<DeviceWatch> watch_;
};

// Scope of one call: orders it after this rank's previous call, and marks its end on the stream.
class StagedCall {
 public:
  StagedCall(const ProcessStaging& staging, std::uint32_t last, cudaStream_t stream);
  ~StagedCall();
  StagedCall(const StagedCall&) = delete;
  StagedCall& operator=(const StagedCall&) = delete;

  void end();

 private:
  const ProcessStaging& staging_;
  const std::uint32_t last_;
  const cudaStream_t stream_;
  bool is_open_ = true;
};

}  // namespace pyringar::cuda
