// staging: the slots and events that one rank shows to ranks in other processes, and theirs
// as they are seen here.
//
// Units     bytes; message n lies in slot n % kStagingSlots, see core/staged_program.h.
// Contract  Every rank owns kStagingSlots slots (memory of its own, never torch's, whose allocator
//           may hand out what cannot be exported) and, for every slot, two events that other
//           processes can wait for: `announced` and `reduced`. The owner records them, all others
//           wait. An event stands for the last time it was recorded before the host asked to wait.
//           So the host waits first, on the counters of the group's shared memory, which are set
//           after the record; then the stream does. Streams wait only for what has been enqueued
//           already, so that no order in which devices run things can keep them waiting for each
//           other; kernels never wait.
//           Why nothing is used again too early:
//             an event  record n + 4 follows, on the host, the owner's wait for all to have
//                       announced n + 2 or to have reduced it; each says so after it has asked its
//                       stream to wait for n. Nobody can ask for n and get n + 4.
//             a slot    A rank's stream holds copy_in(n) after its waits for the events n - 2 of
//             all
//                       ranks: `reduced` in a direct call, `announced` in an exchange. On the
//                       stream of its owner the first stands after all it read of n - 3, the second
//                       after all it read of n - 4. That is the table of core/staged_program.h with
//                       streams in place of hosts; it needs each rank's calls to follow each other
//                       in stream order (begin(), end()), and every message of a group to go
//                       through events, or all streams to be drained before it.
//           Others may read the slots until they have unmapped them: the owner frees after that.
//           Not known yet: what CUDA does with a stream that waits for an event of a process which
//           is killed before its device has come to the record.
// Threads   one at a time.
// Source    the sample simpleIPC of CUDA: events recorded, a barrier on the host, events awaited.
// Tests     tests/cpp/cuda_processes, tests/test_cuda_processes.py
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/staged_program.h"
#include "cuda/runtime.h"

namespace pyringar::cuda {

// Large enough that a piece takes longer than the dozen calls which enqueue it. Not measured yet.
inline constexpr std::size_t kProcessSlotBytes = std::size_t{16} << 20;

// Plain bytes: ranks gather each other's.
struct StagingHandles {
  std::uint64_t slot_bytes;
  cudaIpcMemHandle_t slots;
  std::array<cudaIpcEventHandle_t, kStagingSlots> announced;
  std::array<cudaIpcEventHandle_t, kStagingSlots> reduced;
};

// What others look into, hence what outlives the use of it here.
class OwnStaging {
 public:
  OwnStaging(int device, std::size_t slot_bytes);
  StagingHandles handles() const;

  const int device;
  const std::size_t slot_bytes;
  const Memory slots;
  const std::vector<Event> announced;
  const std::vector<Event> reduced;
};

class ProcessStaging {
 public:
  // own: outlives this. all[r]: of rank r; own ones are not opened.
  ProcessStaging(const OwnStaging& own, int rank, std::span<const StagingHandles> all);

  // Do slots and events of the others deliver what they hold? Every rank writes, all meet, every
  // rank looks. Returns what is wrong, or nothing.
  void write_probe();
  std::string look_at_probes();

  int device() const { return own_.device; }
  std::size_t slot_bytes() const { return own_.slot_bytes; }
  std::byte* slot(int rank, std::uint32_t message) const {
    return bases_[static_cast<std::size_t>(rank)] + message % kStagingSlots * own_.slot_bytes;
  }

  // Around the calls of this rank, whatever streams they are on.
  void begin(cudaStream_t stream) const { last_.make_wait(stream, own_.device); }
  void end(cudaStream_t stream) const { last_.record(stream); }
  // Whether all calls have ended on the device.
  bool is_idle() const { return last_.is_done(); }

  void record_announced(std::uint32_t message, cudaStream_t stream) const {
    own_.announced[message % kStagingSlots].record(stream);
  }
  void await_announced(std::uint32_t message, cudaStream_t stream) const {
    for (const Peer& peer : peers_) {
      peer.announced[message % kStagingSlots].make_wait(stream, own_.device);
    }
  }
  void record_reduced(std::uint32_t message, cudaStream_t stream) const {
    own_.reduced[message % kStagingSlots].record(stream);
  }
  void await_reduced(std::uint32_t message, cudaStream_t stream) const {
    for (const Peer& peer : peers_) {
      peer.reduced[message % kStagingSlots].make_wait(stream, own_.device);
    }
  }

 private:
  struct Peer {
    int rank;
    MappedMemory slots;
    std::vector<Event> announced;
    std::vector<Event> reduced;
  };

  const OwnStaging& own_;
  const int rank_;
  std::vector<Peer> peers_;
  std::vector<std::byte*> bases_;  // by rank
  const Stream probe_stream_;
  const Event last_;
};

}  // namespace pyringar::cuda
