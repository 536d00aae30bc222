// rank_threads: ranks as threads that stand for processes, and calls with random tensors.
//
// Threads   programs run on one thread per rank.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "check.h"
#include "cuda_process/cuda_process_group.h"
#include "process_calls.h"
#include "runtime_model.h"

namespace pyringar::stress {

using namespace pyringar::model;

using Rank = std::size_t;

// Ranks of one group or several, each on a thread that stands for its process.
class RankThreads {
 public:
  // one_in, loads_eagerly: see model::Options. Devices that a test holds cannot load kernels.
  RankThreads(Random& random, int world_size, CudaProcessOptions options, int one_in = 3,
              bool loads_eagerly = false);

  // Run program(group, rank) on all ranks at once, then close the groups.
  using Program = std::function<void(CudaProcessGroup& group, int rank)>;
  void run(const Program& program) const;
  using Groups = std::vector<std::unique_ptr<CudaProcessGroup>>;
  void run_groups(int num_groups,
                  const std::function<void(const Groups&, int rank)>& program) const;

  // Thrown after kill(), which ends the calling rank's process and its view of shared memory.
  struct Killed {};
  void kill(CudaProcessGroup& group) const;

  const CudaProcessOptions& options() const { return options_; }
  int device(int rank) const { return devices_[static_cast<Rank>(rank)]; }

 private:
  std::vector<SharedMemory> make_memory(int num_groups) const;
  Groups join(const std::vector<SharedMemory>& memory, int rank) const;

  const int world_size_;
  const CudaProcessOptions options_;
  const std::uint64_t seed_;
  const std::uint32_t first_message_;
  const std::uint32_t last_reduced_;
  std::vector<int> devices_;
};

CudaProcessOptions random_options(Random& random);

Case make_case(Random& random, int world_size, std::size_t slot_bytes);
Case plain_case(std::size_t numel);  // an all_reduce of one fp32 tensor

// All ranks' tensors of a case. They count as device memory once a call is enqueued.
class AllTensors {
 public:
  AllTensors(const Case& made, int world_size);
  AllTensors(AllTensors&&) = default;
  ~AllTensors();

  CallTensors& operator[](int rank) { return *tensors_[static_cast<Rank>(rank)]; }
  void check(const Case& made, int rank) const;

 private:
  std::vector<std::unique_ptr<CallTensors>> tensors_;
};
std::vector<AllTensors> make_all_tensors(const std::vector<Case>& cases, int world_size);

// Fill the tensors, call, and read results on one stream. Only stream order separates these steps.
CudaProcessGroup::Submitted enqueue_case(const Case& made, CallTensors& tensors,
                                         CudaProcessGroup& group, cudaStream_t stream);
void synchronize(cudaStream_t stream);

}  // namespace pyringar::stress
