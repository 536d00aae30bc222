// module: the Python module _engine: Group, Work, Bucketer, ProcessGroup, names and sizes.
//
// Contract  The GIL is released while data moves, except in calls shorter than a release.
// Tests     tests/test_communicator.py, tests/conformance/test_refused.py
#include <pybind11/pybind11.h>

#include "bindings/bucketer.h"
#include "bindings/group_binding.h"
#include "core/error.h"
#include "core/schedule.h"
#include "cpu/fused.h"
#include "cpu/group.h"
#include "cpu/ring.h"
#include "os/thread.h"

namespace pyringar {

namespace {

using namespace py::literals;

// A call on at most this many bytes, of all ranks together, keeps the GIL: it takes microseconds.
constexpr std::size_t kKeepGilBytes = 128 * 1024;

struct ThreadTransport {
  using Group = GroupWithCache<pyringar::Group>;
  using GroupPtr = std::shared_ptr<Group>;

  static Group& host(Group& group) { return group; }
  static LocalRanks ranks(const Group& group) { return {group.world_size()}; }
  static void run(Group& group, const Collective& collective, PyObject* written) {
    mark_written(written);
    const std::size_t bytes = collective.bytes * static_cast<std::size_t>(collective.num_local);
    if (bytes <= kKeepGilBytes && collective.algorithm == Algorithm::kFused &&
        group.try_run(collective)) {
      return;
    }
    const GilRelease no_gil;
    group.run(collective);
  }
  static py::object submit(const GroupPtr& group, Collective call, py::handle) {
    return py::cast([&] {
      const GilRelease no_gil;  // the call may run in this thread, and take long
      return group->submit(std::move(call));
    }());
  }
  static void wait_until_free(Group& group) {
    const GilRelease no_gil;
    group.wait_for_earlier_calls();
  }
};

py::dict build_info() {
  py::dict info;
#if defined(__clang__)
  info["compiler"] = "clang++ " __clang_version__;
#else
  info["compiler"] = "g++ " __VERSION__;
#endif
#if defined(__AVX512F__)
  info["simd"] = "AVX-512";
#elif defined(__AVX2__)
  info["simd"] = "AVX2";
#elif defined(__ARM_FEATURE_SVE)
  info["simd"] = "SVE";
#elif defined(__ARM_NEON)
  info["simd"] = "NEON";
#elif defined(__SSE2__)
  info["simd"] = "SSE2";
#else
  info["simd"] = "none";
#endif
  info["cores"] = allowed_cores().count();
  return info;
}

template <typename Enum>
py::list names_of(const char* (*name_of)(Enum), int count) {
  py::list names;
  for (int i = 0; i < count; ++i) names.append(name_of(static_cast<Enum>(i)));
  return names;
}

py::dict names() {
  return py::dict(
      "dtypes"_a = names_of(&dtype_name, kNumDTypes), "ops"_a = names_of(&op_name, kNumReduceOps),
      "orders"_a = names_of(&order_name, kNumOrders),
      "algorithms"_a = names_of(&algorithm_name, kNumAlgorithms),
      "process_algorithms"_a = names_of(&process_algorithm_name, kNumProcessAlgorithms));
}

// For tests: sizes in bytes at which the engine cuts tensors differently or changes algorithms.
py::dict limits() {
  return py::dict("fused_block"_a = kMaxBlockBytes, "ring_link"_a = kLinkBytes,
                  "process_slot"_a = kSlotBytes, "process_exchange"_a = kExchangeBytes,
                  "process_piece_of_two"_a = kPieceBytesOfTwo, "process_piece"_a = kPieceBytes,
                  "process_reads_ahead"_a = kReadsAheadBytes);
}

void bind_group(py::module_& m) {
  py::class_<ThreadTransport::Group, ThreadTransport::GroupPtr> group(m, "Group");
  def_list_calls<ThreadTransport>(group);
  group
      .def(py::init([](int world_size, double timeout_s) {
        return new_group<ThreadTransport>(world_size, to_nanoseconds(timeout_s), &check_signals);
      }))
      .def("close", &Group::close, py::call_guard<GilRelease>())
      .def("stats",
           [](ThreadTransport::Group& group) { return stats_dict(group.stats(), &algorithm_name); })
      .def(
          "delay_rank",
          [](ThreadTransport::Group& group, int rank, double seconds) {
            group.delay_rank(rank, to_nanoseconds(seconds));
          },
          py::call_guard<GilRelease>())
      .def("end_delay", &Group::end_delay);
}

}  // namespace

PYBIND11_MODULE(_engine, m) {
  m.doc() = "The CPU engine of pyringar; use pyringar.Communicator.";
  py::register_local_exception_translator(&translate);
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("is_completed", &Work::is_completed)
      .def("exception", [](Work& work) { return as_exception(work.exception()); })
      .def("finished_ns", &Work::finished_ns)
      .def("wait", &wait_for)
      .def("describe", &Work::describe, py::call_guard<GilRelease>());
  bind_group(m);
  bind_bucketer(m);
  bind_process_group(m);
  m.def("end_reading", &TensorReadGuard::end);
  m.def("use_torch_functions", &TorchFunctions::use);  // only tests call it
  m.def("build_info", &build_info);
  m.def("names", &names);
  m.def("limits", &limits);
  m.def("ring_slot_bytes", &ring_slot_bytes);
  m.def("ring_step", [](int rank, int world_size, int step) {
    const RingStep s = ring_step(rank, world_size, step);
    return py::make_tuple(s.send_chunk, s.recv_chunk, s.reduce);
  });
  m.def("ring_num_steps", &ring_num_steps);
  m.def("chunk_range", [](std::size_t numel, int world_size, int chunk) {
    const Range range = chunk_range(numel, world_size, chunk);
    return py::make_tuple(range.begin, range.end);
  });
}

}  // namespace pyringar
