// ranks: ranks as threads that stand for processes, calls with any tensors, and what they must
// give.
//
// Threads   a RankThreads's program runs on a thread per rank.
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

// Ranks, each on a thread that stands for its process, in one group or in several.
class RankThreads {
 public:
  // Starts the devices, too: entries run when another is enqueued once in one_in times; 0: never.
  // Where a device is held no kernel may be loaded.
  RankThreads(Random& random, int world_size, CudaProcessOptions options, int one_in = 3,
              bool loads_eagerly = false);

  // program(group, rank), on all ranks at once; groups are closed after it, at their own times.
  using Program = std::function<void(CudaProcessGroup& group, int rank)>;
  void run(const Program& program) const;
  using Groups = std::vector<std::unique_ptr<CudaProcessGroup>>;
  void run_groups(int num_groups,
                  const std::function<void(const Groups&, int rank)>& program) const;

  // The calling rank's process is gone: what it had enqueued, its threads' view of the memory that
  // it shared. To be thrown out of the program, or from a nap, once this has returned.
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

// Each rank's tensors of a case, which are its device's memory once a call is enqueued.
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

// Fills, calls and reads on one stream: nothing but its order says that the call is in between.
CudaProcessGroup::Submitted enqueue_case(const Case& made, CallTensors& tensors,
                                         CudaProcessGroup& group, cudaStream_t stream);
void synchronize(cudaStream_t stream);

}  // namespace pyringar::stress
