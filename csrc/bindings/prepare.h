// prepare: from Python lists of tensors to a Collective, every check on the way.
//
// Units     lists[rank][i]; every list holds one entry per rank, in rank order.
// Contract  either a Collective that can run as it is, or an Error and nothing changed.
// Threads   with the GIL held.
// Tests     tests/conformance/test_refused.py
#pragma once

#include <pybind11/pytypes.h>

#include "bindings/convert.h"
#include "core/collective.h"

namespace pyringar {

namespace py = pybind11;

using PreparedCollective = Prepared<Collective>;

// devices: null for ranks in the host's memory. world_size 0: as many ranks as there are tensors.
struct Ranks {
  int world_size;
  const std::vector<int>* devices = nullptr;
};

// are_lists: the coalesced call, with lists in place of tensors. is_bound: for messages.
PreparedCollective prepare_all_reduce(py::handle tensors, bool are_lists, Reduction reduction,
                                      Algorithm algorithm, Ranks ranks, bool is_bound = false);
PreparedCollective prepare_reduce_scatter(py::handle outputs, py::handle inputs,
                                          Reduction reduction, Algorithm algorithm, Ranks ranks);
PreparedCollective prepare_all_gather(py::handle outputs, py::handle inputs, Algorithm algorithm,
                                      Ranks ranks);
// An output may be the root's own input.
PreparedCollective prepare_reduce(py::handle output, py::handle inputs, bool are_lists,
                                  Reduction reduction, Algorithm algorithm, int root, Ranks ranks);
PreparedCollective prepare_broadcast(py::handle tensors, bool are_lists, int root, Ranks ranks);

}  // namespace pyringar
