// process_prepare: from the tensors of one rank among processes to a ProcessCall, every check on
// the way; on the host and on GPUs alike.
//
// Floor     bindings
// Contract  Either a ProcessCall that can run as it is, or an Error: nothing was changed, and no
//           other rank was told. What the ranks must have alike (sizes) goes into one digest of the
//           call; strides of elements that do not lie in the order of their index into another.
// Threads   with the GIL held.
// Tests     tests/test_processes.py, tests/test_cuda_processes.py
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/convert.h"
#include "bindings/python_call.h"
#include "bindings/tensor.h"
#include "os/shared_memory.h"
#include "process/call.h"
#include "process/group.h"

namespace pyringar {

struct PreparedCall {
  ProcessCall call;
  py::list written;  // tensors that it writes
  py::list read;     // those it only reads, and copies of such; to be kept
  py::list copies;   // on a GPU: (tensor, its dense copy) of those that are written
};

// This process's part in a group.
struct LocalRank {
  int rank;
  int world_size;
  int device = kHost;
  bool compares_shapes = true;
};

// tensors: one, or a list or tuple.
PreparedCall prepare_process_all_reduce(LocalRank self, py::handle tensors, ReduceOp op,
                                        const char* operation);
PreparedCall prepare_process_reduce_scatter(LocalRank self, py::handle output, py::handle input,
                                            ReduceOp op);
PreparedCall prepare_process_all_gather(LocalRank self, py::handle output, py::handle input);
PreparedCall prepare_process_broadcast(LocalRank self, py::handle tensor, int root);
PreparedCall prepare_process_barrier();

SegmentToken parse_token(const py::bytes& token);
// Laid out, and not opened by anybody yet.
SharedMemory create_segment(int world_size, const py::bytes& token);
SharedMemory open_segment(std::int32_t pid, int fd, int world_size);

py::list absent_ranks_list(const std::vector<int>& ranks);

// {algorithm: {"calls", "bytes", "busy_s"}}; Stats has those as arrays by algorithm.
template <typename Stats>
py::dict process_stats_dict(const Stats& stats) {
  py::dict by_algorithm;
  for (int i = 0; i < kNumProcessAlgorithms; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (stats.calls[at] == 0) continue;
    py::dict row;
    row["calls"] = stats.calls[at];
    row["bytes"] = stats.bytes[at];
    row["busy_s"] = static_cast<double>(stats.busy_ns[at]) * 1e-9;
    by_algorithm[process_algorithm_name(static_cast<ProcessAlgorithm>(i))] = row;
  }
  return by_algorithm;
}

// {"algorithm", "num_pieces"}
py::dict process_plan_dict(const ProcessPlan& plan);

// The calls that both engines' ProcessGroups have. Calls brings what differs:
//   host(group)                             the ProcessGroup on the host
//   local_rank(group)                       prepare_all_reduce(group, tensors, op, algorithm, what)
//   run_or_submit(group, prepared, in_flight)   bind(group, prepared)
template <typename Calls, typename Class>
void def_process_calls(Class& cls) {
  using Ptr = const typename Calls::GroupPtr&;
  cls.def("absent_ranks",
          [](Ptr group) { return absent_ranks_list(Calls::host(*group).absent_ranks()); })
      .def("seal", [](Ptr group) { Calls::host(*group).seal(); })
      .def("all_reduce",
           [](Ptr group, py::handle tensors, py::handle op, py::handle algorithm,
              py::handle in_flight) {
             return Calls::run_or_submit(
                 group, Calls::prepare_all_reduce(*group, tensors, op, algorithm, "all_reduce"),
                 in_flight);
           })
      .def("reduce_scatter",
           [](Ptr group, py::handle output, py::handle input, py::handle op, py::handle in_flight) {
             return Calls::run_or_submit(
                 group,
                 prepare_process_reduce_scatter(Calls::local_rank(*group), output, input,
                                                parse_op(op)),
                 in_flight);
           })
      .def("all_gather",
           [](Ptr group, py::handle output, py::handle input, py::handle in_flight) {
             return Calls::run_or_submit(
                 group, prepare_process_all_gather(Calls::local_rank(*group), output, input),
                 in_flight);
           })
      .def("broadcast",
           [](Ptr group, py::handle tensor, int root, py::handle in_flight) {
             return Calls::run_or_submit(
                 group, prepare_process_broadcast(Calls::local_rank(*group), tensor, root),
                 in_flight);
           })
      .def("barrier",
           [](Ptr group, py::handle in_flight) {
             return Calls::run_or_submit(group, prepare_process_barrier(), in_flight);
           })
      .def("bind",
           [](Ptr group, py::handle tensors, py::handle op, py::handle algorithm) {
             Calls::host(*group).check_usable();
             return Calls::bind(group,
                                Calls::prepare_all_reduce(*group, tensors, op, algorithm, "bind"));
           })
      .def("abort",
           [](Ptr group) {
             const PythonCall python_call(Calls::host(*group).turn());
             return group->close(Leaving::kAborting);
           })
      .def("check_peers",
           [](Ptr group, const std::vector<int>& ranks) { Calls::host(*group).check_peers(ranks); })
      .def("progress", [](Ptr group) { return Calls::host(*group).progress(); })
      .def("set_timeout",
           [](Ptr group, double seconds) {
             Calls::host(*group).set_timeout(to_nanoseconds(seconds));
           })
      .def("close",
           [](Ptr group) {
             const Turn* turn = Calls::host(*group).turn();
             const bool is_interrupted = PythonCall::is_interrupted(turn);
             const PythonCall python_call(turn);
             return group->close(is_interrupted ? Leaving::kAtOnce : Leaving::kAfterCalls);
           })
      // For tests; see ProcessGroup.
      .def("delay", [](Ptr group, py::handle phase, double seconds) {
        const auto parsed = parse<Phase>(phase, "phase", &phase_name, kNumPhases);
        const PythonCall python_call;
        Calls::host(*group).delay(parsed, to_nanoseconds(seconds));
      });
}

}  // namespace pyringar
