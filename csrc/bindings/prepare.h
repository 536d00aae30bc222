// prepare: checks the Python arguments of a call and makes a Collective.
//
// Units     One tuple holds all tensors of a call, rank by rank.
// Contract  An error is raised before any tensor changes, and before the call is announced to
//           other ranks. Ranks in processes compare digests of all sizes, and of the strides of
//           dense tensors that are not in index order.
// Threads   with the GIL held.
// Tests     tests/conformance/test_refused.py, tests/conformance/test_bits.py
#pragma once

#include <pybind11/pytypes.h>

#include "bindings/convert.h"
#include "core/collective.h"

namespace pyringar {

namespace py = pybind11;

// The group's ranks in this process: all ranks, or one.
struct LocalRanks {
  int world_size;  // 0: one rank per tensor of the call
  int first_rank = 0;
  // True if each rank has a separate process. Calls then pass one tensor instead of a list.
  bool is_one_of_processes = false;
  bool compares_shapes = true;
  const std::vector<int>* devices = nullptr;  // GPU index of each local rank; null: host memory

  int num_local(int num_given) const {
    return is_one_of_processes ? 1 : world_size == 0 ? num_given : world_size;
  }
};

enum class Operation : std::uint8_t {
  kAllReduce,
  kAllReduceCoalesced,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kBroadcastCoalesced,
  kReduce,
  kReduceCoalesced,
  kBarrier,
};
inline constexpr int kNumOperations = 9;
const char* operation_name(Operation operation);
CallKind kind_of(Operation operation);
bool is_coalesced(Operation operation);

inline Operation parse_operation(py::handle operation) {
  return parse<Operation>(operation, "operation", &operation_name, kNumOperations);
}

// The tensors of one argument. Later changes of the caller's lists have no effect.
class GivenTensors {
 public:
  // given: one tensor per local rank, or one list per local rank if are_lists. In a group of
  // processes: a tensor or a list, or only a tensor if is_one. argument: name for messages.
  GivenTensors(py::handle given, const char* operation, const char* argument,
               const LocalRanks& ranks, bool are_lists, bool is_one = false);

  int num_ranks() const { return num_ranks_; }
  std::size_t num_tensors() const { return num_tensors_; }  // per rank
  const py::tuple& all() const { return all_; }
  PyObject* at(std::size_t i) const {
    return PyTuple_GET_ITEM(all_.ptr(), static_cast<Py_ssize_t>(i));
  }
  ArgName name(std::size_t i) const { return names_[i]; }

  // Replace arrays of other libraries by tensors that share their memory.
  void adopt_arrays();

 private:
  void read_lists();

  const char* operation_;
  ListNames names_;
  py::tuple all_;
  int num_ranks_ = 1;
  std::size_t num_tensors_ = 1;
};

struct CallOptions {
  Operation operation;
  Reduction reduction{};
  Algorithm algorithm = Algorithm::kFused;
  int root = 0;
  std::string what{};     // the call that the user made: see RemoteCall::what
  bool is_bound = false;  // true: messages name the operation "bind"

  const char* name() const;
};

// A validated call, and the Python objects that must live until it ends.
struct PreparedCollective {
  Collective call;
  py::object written;  // list or tuple of the tensors that the call writes
  py::object read;     // list or tuple of the tensors that it only reads, or None
  py::list copies;     // GPUs: (tensor, dense copy) to copy back; (None, copy) for an input
};

GivenTensors given_tensors(py::handle given, const CallOptions& options, const LocalRanks& ranks);
PreparedCollective prepare_all_reduce(GivenTensors& tensors, const CallOptions& options,
                                      const LocalRanks& ranks);
// outputs, inputs: arguments of the Python call. inputs is None for in-place calls.
PreparedCollective prepare(py::handle outputs, py::handle inputs, const CallOptions& options,
                           const LocalRanks& ranks);

}  // namespace pyringar
