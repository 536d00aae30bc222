// cases: collectives of a cuda::DeviceGroup on the modelled runtime, filled, called and read on
// streams.
//
// Contract  Nothing but the order of streams says that a call comes after what fills its tensors
//           and before what reads them. What is not so is a race, or other bits than the oracle's.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "cuda/device_group.h"
#include "emulated_kernels.h"
#include "runtime_model.h"

namespace pyringar::stress {

// What the probe of peers finds is what the model's kernels reach.
using model::peers;

inline void ok(cudaError_t status, const char* what) {
  CHECK(status == cudaSuccess, what, ": error ", static_cast<int>(status));
}

using Streams = std::vector<cudaStream_t>;
using Ranks = std::vector<int>;

// The model, forgetting all that was; where devices do what they like.
void start(Random& random, model::Options options = {});
Streams make_capturable(const cuda::DeviceGroup& group);  // none is the null stream
cudaStream_t make_stream(int device);  // as frameworks make them: not ordered with the null stream
// One for each device of a group: the null stream now and then.
Streams make_streams(Random& random, const cuda::DeviceGroup& group);
void order(cudaStream_t before, int before_device, cudaStream_t after, int after_device);

// One call: tensors of every rank, reduced in place. Calls that are no ring may also reduce to one
// rank, or broadcast from it.
class GroupCase {
 public:
  // of_rank: the ranks' devices, or kHost.
  // is_large: one tensor that takes every multiprocessor.
  GroupCase(Random& random, std::vector<int> of_rank, Algorithm algorithm, std::size_t most_tensors,
            bool is_large = false);
  ~GroupCase();

  const Collective& collective() const { return collective_; }
  void fill(const cuda::DeviceGroup& group, const Streams& streams);
  void fill_rank(std::size_t rank, cudaStream_t stream);
  void read(const cuda::DeviceGroup& group, const Streams& streams);
  void call(cuda::DeviceGroup& group, const Streams& streams);  // filled before, and read after
  void check() const;                                           // once all is done

 private:
  enum class Kind { kAllReduce, kReduce, kBroadcast };
  struct CaseTensor {
    DType dtype;
    std::size_t numel;
    Tensors tensors;                            // by rank, then perhaps an output of the root's own
    std::vector<std::vector<std::byte>> after;  // by tensor
  };

  void add_buffers(const CaseTensor& tensor);
  std::size_t rank_of(std::size_t tensor) const {
    return tensor < of_rank_.size() ? tensor : root_;
  }

  std::vector<int> of_rank_;
  Kind kind_ = Kind::kAllReduce;
  std::size_t root_ = 0;
  std::deque<CaseTensor> tensors_;
  Collective collective_;
};

}  // namespace pyringar::stress
