// process_prepare: from the tensors of one rank among processes to a ProcessCall, every check on
// the way; on the host and on GPUs alike.
//
// Contract  Either a ProcessCall that can run as it is, or an Error: nothing was changed, and no
//           other rank was told. What the ranks must have alike (sizes) goes into one digest of the
//           call; strides of elements that do not lie in the order of their index into another.
// Threads   with the GIL held.
// Tests     tests/conformance/test_bits.py, tests/test_cuda_processes.py
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/tensor.h"
#include "os/shared_memory.h"
#include "process/call.h"

namespace pyringar {

using PreparedCall = Prepared<ProcessCall>;

// This process's part in a group.
struct LocalRank {
  int rank;
  int world_size;
  int device = kHost;
  bool compares_shapes = true;
};

// Makes `call` the reduction of one tensor that needs no second look. False: it is for
// prepare_process_all_reduce() to look at, and `call` holds nothing of use.
bool make_plain_all_reduce(LocalRank self, PyObject* tensor, Reduction reduction,
                           ProcessCall* call);
// tensors: one, or a list or tuple.
PreparedCall prepare_process_all_reduce(LocalRank self, py::handle tensors, Reduction reduction,
                                        const char* operation);
PreparedCall prepare_process_reduce_scatter(LocalRank self, py::handle output, py::handle input,
                                            Reduction reduction);
PreparedCall prepare_process_all_gather(LocalRank self, py::handle output, py::handle input);
PreparedCall prepare_process_broadcast(LocalRank self, py::handle tensor, int root);
PreparedCall prepare_process_barrier();

SegmentToken parse_token(const py::bytes& token);
// Laid out, and not opened by anybody yet.
SharedMemory create_segment(int world_size, const py::bytes& token);
SharedMemory open_segment(std::int32_t pid, int fd, int world_size);

}  // namespace pyringar
