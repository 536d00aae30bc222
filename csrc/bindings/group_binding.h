// group_binding: the part of the four groups (CPU and CUDA, ranks as threads and as processes) that
// Python sees: calls, bound calls, works, statistics, and how a group ends.
//
// Contract  An engine's file has a struct Engine with
//             Group, GroupPtr     Python's class, with a CallCache `calls`, and its shared_ptr
//             host(group)         answers forked(), has_this_thread(), check_usable(), check()
//             ranks(group)        LocalRanks
//             run(group, call, written)    marks the tensors `written`, then runs the call, or
//                                 enqueues it on GPUs
//             submit(group, call, after)   in the background; returns the work as a Python object.
//                                 after: an event that GPUs wait for; None: the current streams
//             enqueued(group)     GPUs only: the work of all calls on the current streams
//             wait_until_free(group)       for algorithms in Python: waits for earlier calls
//           Tensors are marked before the first write: a call that fails half-way has written too.
// Threads   with the GIL held; an engine releases it while it waits or moves data.
// Tests     tests/test_communicator.py, tests/conformance/test_bits.py, tests/cuda
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/call_cache.h"
#include "bindings/convert.h"
#include "bindings/prepare.h"
#include "bindings/python_call.h"
#include "bindings/tensor.h"
#include "process/process_group.h"

namespace pyringar {

// The parts of the modules _engine and _cuda_engine that have files of their own.
void bind_process_group(py::module_& m);
void bind_cuda_process_group(py::module_& m);

// A group made before fork() is leaked in the child: its locks and threads cannot be used there.
template <typename Engine, typename... Args>
typename Engine::GroupPtr new_group(Args&&... args) {
  const auto destroy = [](typename Engine::Group* group) {
    auto& host = Engine::host(*group);
    if (!host.forked()) delete_group(group, host.has_this_thread());
  };
  return {new typename Engine::Group(std::forward<Args>(args)...), destroy};
}

// -- works ----------------------------------------------------------------------------------------

// Ctrl-C ends the wait, and the group among processes that runs the work.
inline bool wait_for(Work& work, double timeout_s) {
  if (PythonCall::is_interrupted() && !work.is_completed()) {
    fail(ErrorKind::kState,
         "a signal handler cannot wait for a work while the call that it interrupted waits");
  }
  try {
    const PythonCall python_call;
    const auto deadline = Clock::now() + to_nanoseconds(timeout_s);
    while (true) {
      const std::chrono::nanoseconds left = deadline - Clock::now();
      if (work.wait(std::min<std::chrono::nanoseconds>(left, kNapInterval))) return true;
      if (left <= kNapInterval) return false;
      look_at_signals();
    }
  } catch (const PythonErrorPending&) {  // of a signal handler
    work.interrupt();
    throw;
  } catch (const py::error_already_set&) {  // a step's, which the work keeps
    set_python_error(std::current_exception());
    throw PythonErrorPending{};
  }
}

// As an exception object of Python's; None if there is none.
inline py::object as_exception(std::exception_ptr error) {
  if (!error) return py::none();
  set_python_error(std::move(error));
  const py::error_already_set raised;
  return py::reinterpret_borrow<py::object>(raised.value());
}

// -- running --------------------------------------------------------------------------------------

inline void copy_back(const py::list& copies) {
  for (const py::handle pair : copies) {
    const auto both = py::reinterpret_borrow<py::tuple>(pair);
    if (!both[0].is_none()) both[0].attr("detach")().attr("copy_")(both[1]);
  }
}

// A group, and its prepared calls.
template <typename Group>
struct WithCalls : Group {
  using Group::Group;
  CallCache calls;
};

// Returns None after the call, or, with a dict for works in flight, a work.
template <typename Engine>
py::object run_or_submit(const typename Engine::GroupPtr& group, PreparedCollective prepared,
                         py::handle in_flight, py::handle after) {
  Engine::host(*group).check_usable();
  if (in_flight.is_none()) {
    Engine::run(*group, prepared.call, prepared.written.ptr());
    copy_back(prepared.copies);
    return py::none();
  }
  py::list storages = storages_of({prepared.written, prepared.read});
  if constexpr (requires { Engine::enqueued(group); }) {
    if (py::len(prepared.copies) > 0) {
      // The copies back are torch's, on the current streams: there the work ends.
      Engine::run(*group, prepared.call, prepared.written.ptr());
      copy_back(prepared.copies);
      return keep_until_done(in_flight, Engine::enqueued(group),
                             py::make_tuple(std::move(storages), prepared.copies));
    }
  }
  mark_written(prepared.written.ptr());
  py::object work = Engine::submit(group, std::move(prepared.call), after);
  return keep_until_done(in_flight, std::move(work), std::move(storages));
}

// Whether all are tensors on the devices of their ranks: not, for example, arrays.
inline bool are_local(const GivenTensors& tensors, const LocalRanks& ranks) {
  const Reading reading;
  TensorView view;
  for (std::size_t i = 0; i < tensors.all().size(); ++i) {
    const std::size_t rank = i / tensors.num_tensors();
    const int device = ranks.devices == nullptr ? kHost : (*ranks.devices)[rank];
    if (!try_view(tensors.at(i), &view) || view.device != device) return false;
  }
  return true;
}

// An all_reduce, prepared once for tensors at the same addresses. may_decline: false, and nothing
// is done, unless all are tensors on the devices of their ranks.
template <typename Engine>
bool all_reduce(const typename Engine::GroupPtr& group, const CallOptions& options,
                py::handle given, bool may_decline) {
  const LocalRanks ranks = Engine::ranks(*group);
  GivenTensors tensors = given_tensors(given, options, ranks);
  if (const auto call = group->calls.find(options, tensors)) {
    Engine::host(*group).check_usable();
    Engine::run(*group, *call, tensors.all().ptr());
    return true;
  }
  if (may_decline && !are_local(tensors, ranks)) return false;
  PreparedCollective prepared = prepare_all_reduce(tensors, options, ranks);
  Engine::host(*group).check_usable();
  const auto call = std::make_shared<const Collective>(std::move(prepared.call));
  if (py::len(prepared.copies) == 0 && call->packed.empty()) {
    group->calls.keep(options, tensors, call);
  }
  Engine::run(*group, *call, prepared.written.ptr());
  copy_back(prepared.copies);
  return true;
}

// all_reduce as one C function: the path of the calls that a training loop repeats.
template <typename Engine>
struct ReduceNow {
  typename Engine::GroupPtr group;
  CallOptions by_default;  // of calls that name no algorithm
  CallOptions by_auto;     // of calls that name "auto"

  // Of the last call: op, algorithm and order as Python passed them, and what they mean. Strings do
  // not change, so the same objects mean the same.
  std::array<py::object, 3> last_names{};
  CallOptions last_options = by_default;

  // (tensors, op, algorithm, order, are_lists=False) -> bool. False: nothing was done, since the
  // call names another algorithm or an order, a graph is made, or the tensors are elsewhere. The
  // caller takes the general path.
  static PyObject* run(PyObject* capsule, PyObject* const* args, Py_ssize_t num_args) {
    try {
      auto& self = state_of<ReduceNow>(capsule);
      const bool is_known = num_args >= 4 && (self.is_last(args + 1) || self.read(args + 1));
      if (!is_known || TorchFunctions::get().has_dispatch_modes()) Py_RETURN_FALSE;
      CallOptions options = self.last_options;
      if (num_args > 4 && args[4] == Py_True) options.operation = Operation::kAllReduceCoalesced;
      if (!all_reduce<Engine>(self.group, options, args[0], true)) Py_RETURN_FALSE;
    } catch (...) {
      set_python_error(std::current_exception());
      return nullptr;
    }
    Py_RETURN_TRUE;
  }

  bool is_last(PyObject* const* names) const {
    return names[0] == last_names[0].ptr() && names[1] == last_names[1].ptr() &&
           names[2] == last_names[2].ptr();
  }

  // False: the general path is for them.
  bool read(PyObject* const* names) {
    const CallOptions* const chosen = options_for(names[1], names[2]);
    const std::optional<ReduceOp> op = find<ReduceOp>(names[0], &op_name, kNumReduceOps);
    if (chosen == nullptr || !op || !has_order(*op, chosen->reduction.order)) return false;
    // A string of a subclass may run Python code when it is released below.
    const auto is_plain = [](PyObject* name) {
      return name == Py_None || PyUnicode_CheckExact(name);
    };
    if (!std::all_of(names, names + last_names.size(), is_plain)) return false;
    last_options = *chosen;
    last_options.reduction.op = *op;
    for (std::size_t i = 0; i < last_names.size(); ++i) {
      last_names[i] = py::reinterpret_borrow<py::object>(names[i]);
    }
    return true;
  }

  const CallOptions* options_for(PyObject* algorithm, PyObject* order) const {
    if (order != Py_None) return nullptr;
    if (algorithm == Py_None) return &by_default;
    const bool is_text = PyUnicode_Check(algorithm) != 0;
    if (is_text && PyUnicode_CompareWithASCIIString(algorithm, "auto") == 0) return &by_auto;
    const auto named = find<Algorithm>(algorithm, &algorithm_name, kNumAlgorithms);
    if (named == by_default.algorithm) return &by_default;
    return named == by_auto.algorithm ? &by_auto : nullptr;
  }
};

// An all_reduce of tensors that it keeps alive, which must lie where they lay; or a barrier.
template <typename Engine>
struct BoundCall {
  typename Engine::GroupPtr group;
  GivenTensors tensors;
  PreparedCall prepared;

  static PyObject* run(PyObject* capsule, PyObject*) {
    try {
      BoundCall& bound = state_of<BoundCall>(capsule);
      Engine::host(*bound.group).check_usable();
      bound.prepared.check_unchanged(bound.tensors);
      Engine::run(*bound.group, *bound.prepared.call, bound.tensors.all().ptr());
    } catch (...) {
      set_python_error(std::current_exception());
      return nullptr;
    }
    Py_RETURN_NONE;
  }

  static py::object make(const typename Engine::GroupPtr& group, const CallOptions& options,
                         py::handle given) {
    Engine::host(*group).check_usable();
    const LocalRanks ranks = Engine::ranks(*group);
    GivenTensors tensors = given_tensors(given, options, ranks);
    PreparedCollective made = options.operation == Operation::kBarrier
                                  ? prepare(given, py::none(), options, ranks)
                                  : prepare_all_reduce(tensors, options, ranks);
    if (py::len(made.copies) > 0) {
      fail(ErrorKind::kUnsupported,
           "bind: on GPUs, tensors with gaps, or whose strides differ between ranks, cannot be "
           "bound; pass .contiguous() ones");
    }
    PreparedCall prepared(options, tensors,
                          std::make_shared<const Collective>(std::move(made.call)));
    static PyMethodDef method = {"bound_call", &BoundCall::run, METH_NOARGS, "Run the bound call."};
    return function_over(method, std::unique_ptr<BoundCall>(new BoundCall{group, std::move(tensors),
                                                                          std::move(prepared)}));
  }
};

// {algorithm: {"calls", "bytes", "busy_s"}}; without times where only a device knows them.
template <typename Algorithm, int kNum>
py::dict stats_dict(const CallStats<kNum>& stats, const char* (*name_of)(Algorithm),
                    bool has_times = true) {
  py::dict by_algorithm;
  for (std::size_t i = 0; i < stats.calls.size(); ++i) {
    if (stats.calls[i] == 0) continue;
    py::dict row;
    row["calls"] = stats.calls[i];
    row["bytes"] = stats.bytes[i];
    if (has_times) row["busy_s"] = static_cast<double>(stats.busy_ns[i]) * 1e-9;
    by_algorithm[name_of(static_cast<Algorithm>(i))] = row;
  }
  return by_algorithm;
}

// -- the calls of a group -------------------------------------------------------------------------

// The items of pyringar.comm.collective_call.CollectiveCall.
enum CallItem { kOperation, kOutputs, kInputs, kOp, kAlgorithm, kOrder, kRoot, kNumCallItems };

inline py::handle item_of(const py::tuple& call, CallItem item) {
  return PyTuple_GET_ITEM(call.ptr(), item);
}

inline CallOptions parse_options(const py::tuple& call, py::handle what) {
  if (call.size() != kNumCallItems) {
    fail(ErrorKind::kArgument, "call has ", call.size(), " items, expected ", kNumCallItems);
  }
  return {parse_operation(item_of(call, kOperation)),
          parse_reduction(item_of(call, kOp), item_of(call, kOrder)),
          parse_algorithm(item_of(call, kAlgorithm)), py::cast<int>(item_of(call, kRoot)),
          what.is_none() ? "" : py::cast<std::string>(what)};
}

template <typename Engine, typename Class>
void def_calls(Class& cls) {
  using Ptr = const typename Engine::GroupPtr&;
  cls.def(
         "run",
         [](Ptr group, const py::tuple& call, py::handle in_flight, py::handle after,
            py::handle what) -> py::object {
           const CallOptions options = parse_options(call, what);
           const bool can_repeat = in_flight.is_none() && options.what.empty();
           if (can_repeat && kind_of(options.operation) == CallKind::kAllReduce) {
             all_reduce<Engine>(group, options, item_of(call, kOutputs), false);
             return py::none();
           }
           PreparedCollective prepared = prepare(item_of(call, kOutputs), item_of(call, kInputs),
                                                 options, Engine::ranks(*group));
           return run_or_submit<Engine>(group, std::move(prepared), in_flight, after);
         },
         py::arg("call"), py::arg("in_flight") = py::none(), py::arg("after") = py::none(),
         py::arg("what") = py::none())
      // Each an algorithm and an order: of calls that name no algorithm, and of those of "auto".
      .def("prepared",
           [](Ptr group, const py::tuple& by_default, const py::tuple& by_auto) {
             using Now = ReduceNow<Engine>;
             static PyMethodDef method = {
                 "all_reduce_now",
                 reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Now::run)),
                 METH_FASTCALL, "Run an all_reduce and return True, or return False."};
             const auto options = [](const py::tuple& chosen) -> CallOptions {
               return {Operation::kAllReduce,
                       {ReduceOp::kSum, parse_order(chosen[1])},
                       parse_algorithm(chosen[0])};
             };
             return function_over(method, std::unique_ptr<Now>(new Now{group, options(by_default),
                                                                       options(by_auto)}));
           })
      .def("bind", [](Ptr group, py::handle operation, py::handle tensors, py::handle op,
                      py::handle algorithm, py::handle order) {
        const CallOptions options{.operation = parse_operation(operation),
                                  .reduction = parse_reduction(op, order),
                                  .algorithm = parse_algorithm(algorithm),
                                  .is_bound = true};
        return BoundCall<Engine>::make(group, options, tensors);
      });
}

// -- ranks in one process -------------------------------------------------------------------------

// For algorithms in Python: the checks of a call, and the wait for the calls before it.
template <typename Engine, typename Class>
void def_list_calls(Class& cls) {
  using Ptr = const typename Engine::GroupPtr&;
  def_calls<Engine>(cls);
  cls.def("check_call",
          [](Ptr group, py::handle operation, py::handle tensors) {
            Engine::host(*group).check_usable();
            const CallOptions options{.operation = parse_operation(operation)};
            const PreparedCollective prepared =
                prepare(tensors, py::none(), options, Engine::ranks(*group));
            Engine::wait_until_free(*group);
          })
      .def("check_usable", [](Ptr group) { Engine::host(*group).check(); });
}

// -- ranks in processes ---------------------------------------------------------------------------

// host(group) is the ProcessGroup on the host.
template <typename Engine, typename Class>
void def_process_calls(Class& cls) {
  using Ptr = const typename Engine::GroupPtr&;
  def_calls<Engine>(cls);
  cls.def("absent_ranks", [](Ptr group) { return Engine::host(*group).absent_ranks(); })
      .def("seal", [](Ptr group) { Engine::host(*group).seal(); })
      .def(
          "abort",
          [](Ptr group, const std::string& why) {
            const PythonCall python_call;
            if (!why.empty()) Engine::host(*group).abort(join("has left the group: ", why));
            return group->close(CloseMode::kAborting);
          },
          py::arg("why") = "")
      .def(
          "check_peers",
          [](Ptr group, const std::vector<int>& ranks) { Engine::host(*group).check_peers(ranks); })
      .def("tell",
           [](Ptr group, const std::string& text, bool is_late) {
             Engine::host(*group).tell(is_late ? ErrorKind::kTimeout : ErrorKind::kPeerLost, text);
           })
      .def("check",
           [](Ptr group) {
             Engine::host(*group).check_peers({});
             if constexpr (requires { group->raise_untold(); }) group->raise_untold();
           })
      .def("plan",
           [](Ptr group, std::size_t nbytes) {
             const auto [algorithm, num_pieces] = group->plan(nbytes);
             return py::make_tuple(process_algorithm_name(algorithm), num_pieces);
           })
      .def("stats", [](Ptr group) { return stats_dict(group->stats(), &process_algorithm_name); })
      .def("progress", [](Ptr group) { return Engine::host(*group).progress(); })
      .def("set_timeout",
           [](Ptr group, double seconds) {
             Engine::host(*group).set_timeout(to_nanoseconds(seconds));
           })
      .def("close",
           [](Ptr group) {
             const PythonCall python_call;
             return group->close();
           })
      // For tests; see ProcessGroup.
      .def("delay", [](Ptr group, py::handle phase, double seconds) {
        const auto parsed = parse<Phase>(phase, "phase", &phase_name, kNumPhases);
        const PythonCall python_call;
        Engine::host(*group).delay(parsed, to_nanoseconds(seconds));
      });
}

}  // namespace pyringar
