// staging: the slots that one rank shows to ranks in other processes, and the counters by which the
// streams of all ranks wait for each other.
//
// Units     bytes; message n lies in slot n % kStagingSlots, see core/staged_program.h.
// Contract  Every rank owns kStagingSlots slots, which torch's allocator could not export, and the
//           words of its DeviceLine in the group's shared memory (cuda_process/device_watch.h). Its
//           streams write these words, and all other ranks' streams wait for them. Ranks only read
//           from each other's slots.
//
//           No deadlock: a rank enqueues the write of a word, then sets its own counter in shared
//           memory. The other hosts wait for that counter before they enqueue a stream's wait for
//           the word. So each write is enqueued before all waits for it, in any process, and the
//           oldest entry that has not run can always run: for any number of groups and threads,
//           with one hardware queue, and where processes share a GPU.
//
//           No slot is reused too early: copy_in(n) follows this stream's waits for the words n - 2
//           of all ranks, which are `reduced` in a direct call and `announced` in an exchange. The
//           owner writes the first after all its reads of n - 3, the second after those of n - 4.
//           This needs each rank's calls in stream order (StagedCall).
//
//           The owner frees its slots after the other ranks have unmapped them.
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

// 32-bit words in the caller's host memory, which every device sees while this is there.
// write_word: the word holds the value once all that is on the stream before has run and can be
// seen from everywhere (the driver's default flag fences). await_word: what comes after on the
// stream runs once (int32_t)(*addr - value) >= 0; a value that the host writes counts, too, so a
// wait whose writer is gone can be ended. What a driver refuses is an Error of kind kUnsupported.
// Any thread. Source: CUDA Driver API, Stream Memory Operations.
class RegisteredMemory {
 public:
  // device: the one whose streams write and wait. memory: whole pages.
  RegisteredMemory(int device, void* memory, std::size_t bytes);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  // word: lies in the memory.
  void write_word(const Word& word, std::uint32_t value, cudaStream_t stream) const;
  void await_word(const Word& word, std::uint32_t value, cudaStream_t stream) const;

 private:
  std::uintptr_t on_device(const Word& word) const;

  const int device_;
  void* const memory_;
  std::uintptr_t device_memory_ = 0;  // as the device sees it
};

// All of their slots together take no more of the GPU's free memory than this part.
inline constexpr std::size_t kPartOfFree = 16;

// Plain bytes: ranks gather each other's.
struct StagingHandles {
  std::array<char, 16> gpu;  // where it is on the bus: the same name in every process
  std::uint64_t free_bytes;  // there
  cudaIpcMemHandle_t slots;
};

StagingHandles describe_gpu(int device);

struct StagingPlan {
  bool shares_gpu;  // all ranks have the same one
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
  // own, segment, host: outlive this. all[r]: of rank r; own ones are not opened.
  ProcessStaging(const LocalSlots& own, const pyringar::Segment& segment, int rank,
                 const PeerWatch& host, std::span<const StagingHandles> all);

  // Every rank writes, all meet, every rank looks. Returns what does not arrive, or nothing.
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
  // Whether nothing runs there any more because it has failed.
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

// Around a call of this rank: after the one before. The stream says when it has ended.
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
