// group_binding: methods that the four Python group classes share: calls, works, stats, close.
//
// Contract  Each module defines a struct Transport with
//             Group, GroupPtr     the Python class, with a CallCache `calls`, and its shared_ptr
//             host(group)         object with forked(), has_this_thread(), check_usable(), check()
//             ranks(group)        LocalRanks
//             run(group, call, written)    marks `written`, then runs the call or enqueues it
//             submit(group, call, after)   runs the call in the background and returns a work.
//                                 after: GPU events to wait for; None: the current streams
//             enqueued(group)     GPUs: a work for all calls on the current streams
//             wait_until_free(group)       waits for earlier calls, for algorithms in Python
//           Tensors are marked before the first write, since a failed call may have written too.
// Threads   with the GIL held. Transports release it while they wait or move data.
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
#include "bindings/gil_release.h"
#include "bindings/prepare.h"
#include "bindings/tensor.h"
#include "process/process_group.h"

namespace pyringar {

void bind_process_group(py::module_& m);
void bind_cuda_process_group(py::module_& m);

// Make a group. A forked child leaks the group: its locks and threads do not work there.
template <typename Transport, typename... Args>
typename Transport::GroupPtr new_group(Args&&... args) {
  const auto destroy = [](typename Transport::Group* group) {
    auto& host = Transport::host(*group);
    if (!host.forked()) delete_group(group, host.has_this_thread());
  };
  return {new typename Transport::Group(std::forward<Args>(args)...), destroy};
}

// -- works ----------------------------------------------------------------------------------------

// Wait for a work. Ctrl-C ends the wait, and closes a group of processes that runs the work.
inline bool wait_for(Work& work, double timeout_s) {
  if (GilRelease::is_interrupted() && !work.is_completed()) {
    fail(ErrorKind::kState,
         "a signal handler cannot wait for a work while the call that it interrupted waits");
  }
  try {
    const GilRelease no_gil;
    const auto deadline = Clock::now() + to_nanoseconds(timeout_s);
    while (true) {
      const std::chrono::nanoseconds left = deadline - Clock::now();
      if (work.wait(std::min<std::chrono::nanoseconds>(left, kNapInterval))) return true;
      if (left <= kNapInterval) return false;
      check_signals();
    }
  } catch (const PythonErrorPending&) {  // raised by a signal handler
    work.interrupt();
    throw;
  } catch (const py::error_already_set&) {  // raised by a Python step; the work keeps the error
    set_python_error(std::current_exception());
    throw PythonErrorPending{};
  }
}

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

template <typename Group>
struct GroupWithCache : Group {
  using Group::Group;
  CallCache calls;
};

// Run a call and return None. If in_flight is a dict, submit it and return its work.
template <typename Transport>
py::object run_or_submit(const typename Transport::GroupPtr& group, PreparedCollective prepared,
                         py::handle in_flight, py::handle after) {
  Transport::host(*group).check_usable();
  if (in_flight.is_none()) {
    Transport::run(*group, prepared.call, prepared.written.ptr());
    copy_back(prepared.copies);
    return py::none();
  }
  py::list storages = storages_of({prepared.written, prepared.read});
  if constexpr (requires { Transport::enqueued(group); }) {
    if (py::len(prepared.copies) > 0) {
      // torch copies results back on the current streams, so the call runs there too.
      Transport::run(*group, prepared.call, prepared.written.ptr());
      copy_back(prepared.copies);
      return keep_until_done(in_flight, Transport::enqueued(group),
                             py::make_tuple(std::move(storages), prepared.copies));
    }
  }
  mark_written(prepared.written.ptr());
  py::object work = Transport::submit(group, std::move(prepared.call), after);
  return keep_until_done(in_flight, std::move(work), std::move(storages));
}

// True if all objects are tensors on their rank's device. False for arrays of other libraries.
inline bool are_local(const GivenTensors& tensors, const LocalRanks& ranks) {
  const TensorReadGuard reading;
  TensorView view;
  for (std::size_t i = 0; i < tensors.all().size(); ++i) {
    const std::size_t rank = i / tensors.num_tensors();
    const int device = ranks.devices == nullptr ? kHost : (*ranks.devices)[rank];
    if (!try_view(tensors.at(i), &view) || view.device != device) return false;
  }
  return true;
}

// Run an all_reduce, cached if possible. may_decline: if !are_local(), do nothing, return false.
template <typename Transport>
bool all_reduce(const typename Transport::GroupPtr& group, const CallOptions& options,
                py::handle given, bool may_decline) {
  const LocalRanks ranks = Transport::ranks(*group);
  GivenTensors tensors = given_tensors(given, options, ranks);
  if (const auto call = group->calls.find(options, tensors)) {
    Transport::host(*group).check_usable();
    Transport::run(*group, *call, tensors.all().ptr());
    return true;
  }
  if (may_decline && !are_local(tensors, ranks)) return false;
  PreparedCollective prepared = prepare_all_reduce(tensors, options, ranks);
  Transport::host(*group).check_usable();
  const auto call = std::make_shared<const Collective>(std::move(prepared.call));
  if (py::len(prepared.copies) == 0 && call->packed.empty()) {
    group->calls.keep(options, tensors, call);
  }
  Transport::run(*group, *call, prepared.written.ptr());
  copy_back(prepared.copies);
  return true;
}

// all_reduce as a C function: the fast path of training loops.
template <typename Transport>
struct AllReduceFunction {
  typename Transport::GroupPtr group;
  CallOptions by_default;  // options if algorithm is None
  CallOptions by_auto;     // options if algorithm is "auto"

  // Arguments and options of the last call. Identical (immutable) strings mean equal options.
  std::array<py::object, 3> last_names{};
  CallOptions last_options = by_default;

  // Python: (tensors, op, algorithm, order, are_lists=False) -> bool. False: this function did
  // nothing, and the caller must use the general path.
  static PyObject* run(PyObject* capsule, PyObject* const* args, Py_ssize_t num_args) {
    try {
      auto& self = state_of<AllReduceFunction>(capsule);
      const bool is_known = num_args >= 4 && (self.is_last(args + 1) || self.read(args + 1));
      if (!is_known || TorchFunctions::get().has_dispatch_modes()) Py_RETURN_FALSE;
      CallOptions options = self.last_options;
      if (num_args > 4 && args[4] == Py_True) options.operation = Operation::kAllReduceCoalesced;
      if (!all_reduce<Transport>(self.group, options, args[0], true)) Py_RETURN_FALSE;
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

  // Parse and store names (op, algorithm, order). False: the caller must use the general path.
  bool read(PyObject* const* names) {
    const CallOptions* const chosen = options_for(names[1], names[2]);
    const std::optional<ReduceOp> op = find<ReduceOp>(names[0], &op_name, kNumReduceOps);
    if (chosen == nullptr || !op || !has_order(*op, chosen->reduction.order)) return false;
    // Do not store a str subclass: releasing the object could run Python code.
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

// A bound barrier or all_reduce, which keeps its tensors alive and requires unchanged memory.
template <typename Transport>
struct BoundCall {
  typename Transport::GroupPtr group;
  GivenTensors tensors;
  PreparedCall prepared;

  static PyObject* run(PyObject* capsule, PyObject*) {
    try {
      BoundCall& bound = state_of<BoundCall>(capsule);
      Transport::host(*bound.group).check_usable();
      bound.prepared.check_unchanged(bound.tensors);
      Transport::run(*bound.group, *bound.prepared.call, bound.tensors.all().ptr());
    } catch (...) {
      set_python_error(std::current_exception());
      return nullptr;
    }
    Py_RETURN_NONE;
  }

  static py::object make(const typename Transport::GroupPtr& group, const CallOptions& options,
                         py::handle given) {
    Transport::host(*group).check_usable();
    const LocalRanks ranks = Transport::ranks(*group);
    GivenTensors tensors = given_tensors(given, options, ranks);
    PreparedCollective made = options.operation == Operation::kBarrier
                                  ? prepare(given, py::none(), options, ranks)
                                  : prepare_all_reduce(tensors, options, ranks);
    if (py::len(made.copies) > 0) {
      fail(ErrorKind::kUnsupported,
           "bind: on GPUs, tensors with gaps, or whose strides differ between ranks, cannot be "
           "bound; pass .contiguous() tensors");
    }
    PreparedCall prepared(options, tensors,
                          std::make_shared<const Collective>(std::move(made.call)));
    static PyMethodDef method = {"bound_call", &BoundCall::run, METH_NOARGS, "Run the bound call."};
    return function_over(method, std::unique_ptr<BoundCall>(new BoundCall{group, std::move(tensors),
                                                                          std::move(prepared)}));
  }
};

// Return {algorithm: {"calls", "bytes", "busy_s"}}. has_times: include "busy_s".
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

// Index of each item in pyringar.comm.collective_call.CollectiveCall.
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

template <typename Transport, typename Class>
void def_calls(Class& cls) {
  using Ptr = const typename Transport::GroupPtr&;
  cls.def(
         "run",
         [](Ptr group, const py::tuple& call, py::handle in_flight, py::handle after,
            py::handle what) -> py::object {
           const CallOptions options = parse_options(call, what);
           const bool can_repeat = in_flight.is_none() && options.what.empty();
           if (can_repeat && kind_of(options.operation) == CallKind::kAllReduce) {
             all_reduce<Transport>(group, options, item_of(call, kOutputs), false);
             return py::none();
           }
           PreparedCollective prepared = prepare(item_of(call, kOutputs), item_of(call, kInputs),
                                                 options, Transport::ranks(*group));
           return run_or_submit<Transport>(group, std::move(prepared), in_flight, after);
         },
         py::arg("call"), py::arg("in_flight") = py::none(), py::arg("after") = py::none(),
         py::arg("what") = py::none())
      // by_default, by_auto: (algorithm, order) for calls without an algorithm, and with "auto".
      .def("prepared",
           [](Ptr group, const py::tuple& by_default, const py::tuple& by_auto) {
             using Now = AllReduceFunction<Transport>;
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
        return BoundCall<Transport>::make(group, options, tensors);
      });
}

// -- ranks in one process -------------------------------------------------------------------------

template <typename Transport, typename Class>
void def_list_calls(Class& cls) {
  using Ptr = const typename Transport::GroupPtr&;
  def_calls<Transport>(cls);
  cls.def("check_call",
          [](Ptr group, py::handle operation, py::handle tensors) {
            Transport::host(*group).check_usable();
            const CallOptions options{.operation = parse_operation(operation)};
            const PreparedCollective prepared =
                prepare(tensors, py::none(), options, Transport::ranks(*group));
            Transport::wait_until_free(*group);
          })
      .def("check_usable", [](Ptr group) { Transport::host(*group).check(); });
}

// -- ranks in processes ---------------------------------------------------------------------------

template <typename Transport, typename Class>
void def_process_calls(Class& cls) {
  using Ptr = const typename Transport::GroupPtr&;
  def_calls<Transport>(cls);
  cls.def("absent_ranks", [](Ptr group) { return Transport::host(*group).absent_ranks(); })
      .def("seal", [](Ptr group) { Transport::host(*group).seal(); })
      .def(
          "abort",
          [](Ptr group, const std::string& why) {
            const GilRelease no_gil;
            if (!why.empty()) Transport::host(*group).abort(join("has left the group: ", why));
            return group->close(CloseMode::kAborting);
          },
          py::arg("why") = "")
      .def("check_peers",
           [](Ptr group, const std::vector<int>& ranks) {
             Transport::host(*group).check_peers(ranks);
           })
      .def("tell",
           [](Ptr group, const std::string& text, bool is_late) {
             Transport::host(*group).tell(is_late ? ErrorKind::kTimeout : ErrorKind::kPeerLost,
                                          text);
           })
      .def("check",
           [](Ptr group) {
             Transport::host(*group).check_peers({});
             if constexpr (requires { group->raise_unreported(); }) group->raise_unreported();
           })
      .def("plan",
           [](Ptr group, std::size_t nbytes) {
             const auto [algorithm, num_pieces] = group->plan(nbytes);
             return py::make_tuple(process_algorithm_name(algorithm), num_pieces);
           })
      .def("stats", [](Ptr group) { return stats_dict(group->stats(), &process_algorithm_name); })
      .def("progress", [](Ptr group) { return Transport::host(*group).progress(); })
      .def("set_timeout",
           [](Ptr group, double seconds) {
             Transport::host(*group).set_timeout(to_nanoseconds(seconds));
           })
      .def("close",
           [](Ptr group) {
             const GilRelease no_gil;
             return group->close();
           })
      .def("delay", [](Ptr group, py::handle phase, double seconds) {
        const auto parsed = parse<Phase>(phase, "phase", &phase_name, kNumPhases);
        const GilRelease no_gil;
        Transport::host(*group).delay(parsed, to_nanoseconds(seconds));
      });
}

}  // namespace pyringar
