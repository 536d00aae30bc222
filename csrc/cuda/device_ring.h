// device_ring: slots and flags of a ring over GPUs, and the launches of its kernel.
//
// Contract  One launch per device and tensor, with all blocks resident at once. The caller orders
//           the launches. Slots and flags are on a device that both ends of a link can access, else
//           in host memory. A failed wait stays recorded.
// Threads   one at a time.
// Source    core/ring_program.h, cuda/ring.cuh
// Tests     tests/cpp/cuda_host
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/collective.h"
#include "cuda/args.h"
#include "cuda/devices.h"

namespace pyringar::cuda {

class DeviceRing {
 public:
  DeviceRing(Devices& devices, std::chrono::nanoseconds timeout, const char* operation);
  void launch(const Buffers& tensor, Fold fold, Streams streams, int withheld_rank);

  // End waiting blocks, and all blocks of later launches.
  void abort() const;
  std::string failure(const char* operation) const;

 private:
  // Failures reported by the kernels of one device.
  struct DeviceRecords {
    Memory gave_up;  // one word: WaitLimits::gave_up
    Memory failure;  // a Failure in host memory
  };
  struct RankMemory {
    Memory slots;  // prev writes into it, this rank reads
    Memory flag;   // prev counts messages, this rank waits
    Memory taken;  // next counts read messages, this rank waits
    Memory base;
  };
  struct PieceCut {
    std::size_t piece_elems;
    int num_channels;  // 0: nothing to send
  };

  void choose_channels(const char* operation);
  WaitLimits patience(std::size_t d, int withheld_rank) const;
  std::string describe(const Failure& failure, const char* operation) const;
  RankMemory make_rank_memory(std::size_t rank) const;
  Memory make_ports(const Device& device) const;
  PieceCut cut(const Buffers& tensor, const std::vector<int>& most_blocks) const;
  RingArgs arguments(std::size_t d, const Buffers& tensor, Fold fold, const PieceCut& cut) const;
  std::size_t next_of(std::size_t rank) const { return (rank + 1) % num_ranks_; }
  std::size_t prev_of(std::size_t rank) const { return (rank + num_ranks_ - 1) % num_ranks_; }

  Devices& devices_;
  const std::chrono::nanoseconds timeout_;
  const std::size_t num_ranks_;
  const std::uint32_t num_slots_;
  int num_channels_;
  std::uint32_t slot_bytes_ = 0;
  std::vector<RankMemory> rank_memory_;  // by rank
  std::vector<Memory> ports_;            // RingPorts, by device
  std::vector<DeviceRecords> records_;   // by device
};

}  // namespace pyringar::cuda
