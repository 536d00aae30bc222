// prepare: from the tensors of a call in Python to a Collective, every check on the way.
//
// Units     One tuple has all tensors of a call, rank after rank, each rank's in its list's order.
// Contract  Either a Collective that can run, or an Error: nothing was changed, and no rank was
//           told. Ranks in other processes compare a digest of sizes, and one of the strides of
//           dense tensors that are not in the order of their index.
// Threads   with the GIL held.
// Tests     tests/conformance/test_refused.py, tests/conformance/test_bits.py
#pragma once

#include <pybind11/pytypes.h>

#include "bindings/convert.h"
#include "core/collective.h"

namespace pyringar {

namespace py = pybind11;

// The ranks of a group that are in this process: all of a group, or one.
struct LocalRanks {
  int world_size;  // 0: as many ranks as the call has tensors
  int first_rank = 0;
  // Every rank has a separate process. The local rank's tensor is passed bare.
  bool is_one_of_processes = false;
  bool compares_shapes = true;
  const std::vector<int>* devices = nullptr;  // of each local rank; null: in the host's memory

  int num_local(int num_given) const {
    return is_one_of_processes ? 1 : world_size == 0 ? num_given : world_size;
  }
};

// The calls as Python names them.
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

// One argument of a call: its tensors, read from lists that may change afterwards.
class GivenTensors {
 public:
  // given: a tensor for each local rank; if are_lists, a list for each. Of one rank among processes
  // a tensor, or a list; is_one: a tensor only. argument: its name in messages.
  GivenTensors(py::handle given, const char* operation, const char* argument,
               const LocalRanks& ranks, bool are_lists, bool is_one = false);

  int num_ranks() const { return num_ranks_; }
  std::size_t num_tensors() const { return num_tensors_; }  // of each rank
  const py::tuple& all() const { return all_; }
  PyObject* at(std::size_t i) const {
    return PyTuple_GET_ITEM(all_.ptr(), static_cast<Py_ssize_t>(i));
  }
  ArgName name(std::size_t i) const { return names_[i]; }

  // Tensors that share the memory of arrays of other libraries. Before it the tuple holds what the
  // caller passed.
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
  std::string what{};     // see RemoteCall
  bool is_bound = false;  // for messages

  const char* name() const;
};

// A checked call, and the objects that must live until it is done.
struct PreparedCollective {
  Collective call;
  py::object written;  // the tensors that it writes; like `read` a list or tuple of its own
  py::object read;     // those it only reads; None: there are none
  py::list copies;     // on GPUs: (tensor, dense copy), to be copied back; (None, copy) of an input
};

// The tensors, or lists of tensors, of an all_reduce.
GivenTensors given_tensors(py::handle given, const CallOptions& options, const LocalRanks& ranks);
// tensors: adopts arrays of other libraries.
PreparedCollective prepare_all_reduce(GivenTensors& tensors, const CallOptions& options,
                                      const LocalRanks& ranks);
// outputs, inputs: as Python passed them; inputs are None where a call is in place.
PreparedCollective prepare(py::handle outputs, py::handle inputs, const CallOptions& options,
                           const LocalRanks& ranks);

}  // namespace pyringar
