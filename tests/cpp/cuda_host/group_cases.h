// group_cases: random collectives of a cuda::DeviceGroup on the modelled runtime.
//
// Contract  Only stream order separates filling the tensors, the call, and reading them. If a
//           group omits a stream wait, the model reports a race, or the results are wrong.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "cuda/device_group.h"
#include "emulated_kernels.h"
#include "runtime_model.h"

namespace pyringar::stress {

// Peer access in the model; replaces the probe of cuda/peers.cu.
using model::peers;

inline void ok(cudaError_t status, const char* what) {
  CHECK(status == cudaSuccess, what, ": error ", static_cast<int>(status));
}

using Streams = std::vector<cudaStream_t>;
using Ranks = std::vector<int>;

// Reset the model, with random scheduling.
void start(Random& random, model::Options options = {});
Streams make_capturable(const cuda::DeviceGroup& group);  // null streams cannot be captured
cudaStream_t make_stream(int device);                     // non-blocking, as frameworks make them
// One stream per device, sometimes the null stream.
Streams make_streams(Random& random, const cuda::DeviceGroup& group);
void order(cudaStream_t before, int before_device, cudaStream_t after, int after_device);

// One random call and its tensors: all_reduce, or (except for rings) reduce or broadcast.
class GroupCase {
 public:
  // of_rank: device of each rank, or kHost. is_large: kernels take every multiprocessor.
  GroupCase(Random& random, std::vector<int> of_rank, Algorithm algorithm, std::size_t most_tensors,
            bool is_large = false);
  ~GroupCase();

  const Collective& collective() const { return collective_; }
  void fill(const cuda::DeviceGroup& group, const Streams& streams);
  void fill_rank(std::size_t rank, cudaStream_t stream);
  void read(const cuda::DeviceGroup& group, const Streams& streams);
  void call(cuda::DeviceGroup& group, const Streams& streams);  // fill(), run(), read()
  void check() const;                                           // call after all work has run

 private:
  enum class Kind { kAllReduce, kReduce, kBroadcast };
  struct CaseTensor {
    DType dtype;
    std::size_t numel;
    Tensors tensors;  // one per rank, then perhaps a separate output of the root
    std::vector<std::vector<std::byte>> after;  // results, by tensor
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
