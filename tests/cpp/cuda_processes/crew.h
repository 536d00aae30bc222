// crew: ranks as threads that stand for processes, calls with any tensors, and what they must give.
//
// Threads   a Crew's program runs on a thread per rank.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <vector>

#include "check.h"
#include "cuda_process/group.h"
#include "oracle.h"
#include "runtime_model.h"

namespace pyringar::stress {

using namespace pyringar::model;

using Rank = std::size_t;

// Ranks, each on a thread that stands for its process, in one group or in several.
class Crew {
 public:
  // Starts the devices, too: entries run when another is enqueued once in one_in times; 0: never.
  // Where a device is held no kernel may be loaded.
  Crew(Random& random, int world_size, CudaProcessOptions options, int one_in = 3,
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
  int place(int rank) const { return places_[static_cast<Rank>(rank)]; }

 private:
  std::vector<SharedMemory> make_memory(int num_groups) const;
  Groups join(const std::vector<SharedMemory>& memory, int rank) const;

  const int world_size_;
  const CudaProcessOptions options_;
  const std::uint64_t seed_;
  const std::uint32_t first_message_;
  const std::uint32_t last_reduced_;
  std::vector<int> places_;
};

CudaProcessOptions random_options(Random& random);

// -- one call, and what it must give --------------------------------------------------------------

struct Shape {
  DType dtype;
  std::size_t numel;
};

struct Case {
  CallKind kind;
  Fold fold;
  int root;
  bool is_async;
  std::vector<Shape> shapes;  // all_reduce: of all tensors; else of the share
  std::uint64_t seed;
};

Case make_case(Random& random, int world_size, std::size_t slot_bytes);
Case plain_case(std::size_t numel);  // an all_reduce of one fp32 tensor

// One rank's tensors of a case: what goes in, the device's memory once a call is enqueued, and what
// came out.
struct Tensors {
  struct One {
    Shape shape;
    std::vector<std::byte> before;
    Guarded memory;
    std::vector<std::byte> after;

    One(Random& random, Shape s)
        : shape(s), before(bytes()), memory(random, bytes()), after(bytes()) {
      fill(random, s.dtype, before.data(), s.numel);
    }
    ~One() { hide_tensor(memory.data()); }
    One(const One&) = delete;
    One& operator=(const One&) = delete;
    std::size_t bytes() const { return shape.numel * item_bytes(shape.dtype); }
    TensorSpan span() const { return {memory.data(), shape.numel, shape.dtype}; }
  };
  std::vector<std::unique_ptr<One>> inputs;
  std::vector<std::unique_ptr<One>> outputs;  // where they are not the inputs
  const std::vector<std::unique_ptr<One>>& results() const {
    return outputs.empty() ? inputs : outputs;
  }
};

Tensors make_tensors(const Case& made, int world_size, int rank);
// Of each case, each rank's.
std::vector<std::vector<Tensors>> make_all_tensors(const std::vector<Case>& cases, int world_size);

// Fills, calls and reads on one stream: nothing but its order says that the call is in between.
CudaProcessGroup::Submitted enqueue_case(const Case& made, Tensors& tensors,
                                         CudaProcessGroup& group, cudaStream_t stream);
void check_case(const Case& made, const std::vector<Tensors>& all, int rank);
void check_unchanged(const Tensors& tensors);
void synchronize(cudaStream_t stream);

// -- what the program does ------------------------------------------------------------------------

struct Part {
  const char* name;
  void (*check)(Random& random);
  int one_in;  // rounds
};
extern const std::vector<Part> kFaults;

}  // namespace pyringar::stress
