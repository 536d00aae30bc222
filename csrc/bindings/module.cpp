// module: the engine as Python sees it: Group, Work, Bound, and the schedule, for
//         predictions and tests.
//
// Floor     bindings
// Contract  pyringar.engine.load loads it; pyringar.comm.communicator is its only user, but for the
//           schedule. Errors arrive as the classes of pyringar.errors. The GIL is released while
//           data moves, except for calls so short that handing it over would take longer.
// Tests     tests/test_communicator.py, tests/test_arguments.py

#include <pybind11/pybind11.h>

#include <algorithm>

#include "bindings/bucketer.h"
#include "bindings/convert.h"
#include "bindings/prepare.h"
#include "bindings/process.h"
#include "bindings/python_call.h"
#include "bindings/tensor.h"
#include "core/error.h"
#include "core/schedule.h"
#include "cpu/group.h"

namespace pyringar {

namespace {

// Payload of all ranks up to which a call keeps the GIL: some microseconds of work.
constexpr std::size_t kKeepGilBytes = 128 * 1024;

// A group made before fork() is leaked in the child: its locks and threads are not usable there.
struct GroupDeleter {
  void operator()(Group* group) const {
    if (group->forked()) return;
    const PythonCall python_call(PythonCall::Signals::kWait);
    delete group;
  }
};
using GroupPtr = std::shared_ptr<Group>;

void run(Group& group, const Collective& collective, int world_size) {
  if (collective.bytes * static_cast<std::size_t>(world_size) <= kKeepGilBytes &&
      collective.algorithm == Algorithm::kFused && group.try_run(collective)) {
    return;
  }
  const PythonCall python_call;
  group.run(collective);
}

// A call that was checked once. It keeps the tensors and their storages, so that the memory stays.
struct Bound {
  GroupPtr group;
  Prepared prepared;
  py::list storages;

  Bound(GroupPtr g, Prepared p)
      : group(std::move(g)), prepared(std::move(p)), storages(storages_of({prepared.written})) {}

  void call() {
    group->check_usable();
    mark_written(prepared.written.ptr());
    run(*group, prepared.collective, static_cast<int>(storages.size()));
  }
};

constexpr const char* kBoundCapsule = "pyringar.bound";

// A plain C function for Python: a bound call lasts a microsecond, and a class would add a third.
PyObject* call_bound(PyObject* capsule, PyObject*) {
  try {
    static_cast<Bound*>(PyCapsule_GetPointer(capsule, kBoundCapsule))->call();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
  Py_RETURN_NONE;
}

py::object make_bound(GroupPtr group, Prepared prepared) {
  static PyMethodDef method = {"bound_all_reduce", &call_bound, METH_NOARGS,
                               "Reduce the bound tensors in place."};
  const py::capsule capsule(
      new Bound(std::move(group), std::move(prepared)), kBoundCapsule,
      [](PyObject* c) { delete static_cast<Bound*>(PyCapsule_GetPointer(c, kBoundCapsule)); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
}

// Runs now and returns None, or, with a dict for what is in flight, submits and returns the Work:
// the caller may drop its lists, or change them.
py::object run_or_submit(const GroupPtr& group, Prepared prepared, py::handle in_flight) {
  group->check_usable();
  // Before the first write: a collective that fails half-way has written too.
  mark_written(prepared.written.ptr());
  if (!in_flight.is_none()) {
    py::list storages = storages_of({prepared.written, prepared.read});
    auto work = group->submit(std::move(prepared.collective));
    return keep_until_done(in_flight, py::cast(work), std::move(storages));
  }
  const auto ranks = std::max<std::size_t>(1, py::len(prepared.written));
  run(*group, prepared.collective, static_cast<int>(ranks));
  return py::none();
}

// Ctrl-C ends the wait, not the work.
bool wait_for(Work& work, double timeout_s) {
  check_can_end(work);
  try {
    const PythonCall python_call(work.turn());
    const auto deadline = std::chrono::steady_clock::now() + to_nanoseconds(timeout_s);
    while (true) {
      const std::chrono::nanoseconds left = deadline - std::chrono::steady_clock::now();
      if (work.wait(std::min<std::chrono::nanoseconds>(left, kNapInterval))) return true;
      if (left <= kNapInterval) return false;
      look_at_signals();
    }
  } catch (const py::error_already_set&) {  // a step's, which the work keeps
    set_python_error(std::current_exception());
    throw PythonErrorPending{};
  }
}

py::object exception_of(Work& work) {
  const std::exception_ptr error = work.exception();
  if (!error) return py::none();
  set_python_error(error);
  const py::error_already_set raised;
  return py::reinterpret_borrow<py::object>(raised.value());
}

py::dict stats_dict(Group& group) {
  const GroupStats stats = group.stats();
  py::dict by_algorithm;
  for (int i = 0; i < kNumAlgorithms; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (stats.calls[at] == 0) continue;
    py::dict row;
    row["calls"] = stats.calls[at];
    row["bytes"] = stats.bytes[at];
    row["busy_s"] = static_cast<double>(stats.busy_ns[at]) * 1e-9;
    by_algorithm[algorithm_name(static_cast<Algorithm>(i))] = row;
  }
  return by_algorithm;
}

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
#if defined(__F16C__)
  info["fp16_conversion"] = "hardware";
#else
  info["fp16_conversion"] = "integer arithmetic";
#endif
#if defined(__linux__) && !defined(PYRINGAR_NO_FUTEX)
  info["waits"] = "futex";
#else
  info["waits"] = "condition variables";
#endif
  info["cores"] = allowed_cores().count();
  return info;
}

// For the algorithms in Python: the next to run, as run() would be, or the reason why not.
void wait_for_turn(Group& group) {
  const PythonCall python_call;
  group.wait_for_turn();
}

void bind_group(py::module_& m) {
  py::class_<Group, GroupPtr>(m, "Group")
      .def(py::init([](int world_size, double timeout_s) {
             return GroupPtr(new Group(world_size, to_nanoseconds(timeout_s), &look_at_signals),
                             GroupDeleter{});
           }),
           py::arg("world_size"), py::arg("timeout_s"))
      .def("all_reduce",
           [](const GroupPtr& group, py::handle tensors, py::handle op, py::handle algorithm,
              py::handle in_flight) {
             return run_or_submit(
                 group,
                 prepare_all_reduce(tensors, parse_op(op), parse_algorithm(algorithm),
                                    {group->world_size()}, "all_reduce"),
                 in_flight);
           })
      .def("all_reduce_coalesced",
           [](const GroupPtr& group, py::handle lists, py::handle op, py::handle algorithm,
              py::handle in_flight) {
             return run_or_submit(
                 group,
                 prepare_all_reduce_coalesced(lists, parse_op(op), parse_algorithm(algorithm),
                                              {group->world_size()}),
                 in_flight);
           })
      .def("reduce_scatter",
           [](const GroupPtr& group, py::handle outputs, py::handle inputs, py::handle op,
              py::handle algorithm, py::handle in_flight) {
             return run_or_submit(
                 group,
                 prepare_reduce_scatter(outputs, inputs, parse_op(op), parse_algorithm(algorithm),
                                        {group->world_size()}),
                 in_flight);
           })
      .def("all_gather",
           [](const GroupPtr& group, py::handle outputs, py::handle inputs, py::handle algorithm,
              py::handle in_flight) {
             return run_or_submit(group,
                                  prepare_all_gather(outputs, inputs, parse_algorithm(algorithm),
                                                     {group->world_size()}),
                                  in_flight);
           })
      .def("broadcast",
           [](const GroupPtr& group, py::handle tensors, int root, py::handle in_flight) {
             return run_or_submit(group, prepare_broadcast(tensors, root, {group->world_size()}),
                                  in_flight);
           })
      .def("bind",
           [](const GroupPtr& group, py::handle tensors, py::handle op, py::handle algorithm) {
             group->check_usable();
             return make_bound(group,
                               prepare_all_reduce(tensors, parse_op(op), parse_algorithm(algorithm),
                                                  {group->world_size()}, "bind"));
           })
      .def("check",
           [](const GroupPtr& group, py::handle tensors) {
             group->check_usable();
             const Prepared prepared = prepare_all_reduce(
                 tensors, ReduceOp::kSum, Algorithm::kFused, {group->world_size()}, "all_reduce");
             wait_for_turn(*group);
           })
      .def("check_coalesced",
           [](const GroupPtr& group, py::handle lists) {
             group->check_usable();
             const Prepared prepared = prepare_all_reduce_coalesced(
                 lists, ReduceOp::kSum, Algorithm::kFused, {group->world_size()});
             wait_for_turn(*group);
           })
      .def("close", &Group::close, py::call_guard<PythonCall>())
      .def("stats", &stats_dict)
      .def(
          "delay_rank",
          [](Group& group, int rank, double seconds) {
            group.delay_rank(rank, to_nanoseconds(seconds));
          },
          py::call_guard<PythonCall>());
}

}  // namespace

PYBIND11_MODULE(_engine, m) {
  m.doc() = "The CPU engine of pyringar; use pyringar.Communicator.";
  py::register_exception_translator(&translate);
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("is_completed", &Work::is_completed)
      .def("exception", &exception_of)
      .def("finished_ns", &Work::finished_ns)
      .def("wait", &wait_for)
      .def("describe", &Work::describe, py::call_guard<PythonCall>());
  bind_group(m);
  bind_bucketer(m);
  bind_process_group(m);
  m.def("build_info", &build_info);
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
