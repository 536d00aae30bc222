// group_binding: what the four groups (CPU and CUDA, ranks as threads and as processes) show Python
// alike: calls, bound calls, works, statistics, and how a group ends.
//
// Contract  An engine's file brings a struct Engine with
//             Group, GroupPtr       the class that Python sees, held by a shared_ptr
//             host(group)           answers forked(), has_this_thread(), check_usable(), check()
//             run(group, call)      now; on GPUs the work is enqueued when this returns
//             submit(group, call, after)   in the background; returns the work as a Python object.
//                                   after: None, or what GPUs wait for in place of what is on the
//                                   current streams
//             mark_and_run(group, call, written)   if it marks a bound call's tensors itself
//             enqueued(group)       GPUs only: the work of all that is on the current streams
//           and what def_rank_calls() or def_process_calls() name besides. Tensors are marked as
//           written before the first write: a call that fails half-way has written too.
// Threads   with the GIL held; an engine releases it while it waits or moves data.
// Tests     tests/test_communicator.py, tests/conformance/test_bits.py, tests/cuda
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/call_cache.h"
#include "bindings/convert.h"
#include "bindings/prepare.h"
#include "bindings/process_prepare.h"
#include "bindings/python_call.h"
#include "bindings/tensor.h"
#include "process/group.h"

namespace pyringar {

// The parts of the modules _engine and _cuda_engine that have files of their own.
void bind_process_group(py::module_& m);
void bind_cuda_process_group(py::module_& m);

// A group made before fork() is leaked in the child: its locks and threads cannot be used there.
template <typename Engine>
struct GroupDeleter {
  void operator()(typename Engine::Group* group) const {
    auto& host = Engine::host(*group);
    if (!host.forked()) delete_group(group, host.has_this_thread());
  }
};

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

// Runs now and returns None, or, with a dict for what is in flight, returns a work.
template <typename Engine, typename Call>
py::object run_or_submit(const typename Engine::GroupPtr& group, Prepared<Call> prepared,
                         py::handle in_flight, py::handle after = Py_None) {
  Engine::host(*group).check_usable();
  mark_written(prepared.written.ptr());
  if (in_flight.is_none()) {
    Engine::run(*group, prepared.call);
    copy_back(prepared.copies);
    return py::none();
  }
  py::list storages = storages_of({prepared.written, prepared.read});
  if constexpr (requires { Engine::enqueued(group); }) {
    if (py::len(prepared.copies) > 0) {
      // The copies back are torch's, on the current streams: there the work ends.
      Engine::run(*group, prepared.call);
      copy_back(prepared.copies);
      return keep_until_done(in_flight, Engine::enqueued(group),
                             py::make_tuple(std::move(storages), prepared.copies));
    }
  }
  py::object work = Engine::submit(group, std::move(prepared.call), after);
  return keep_until_done(in_flight, std::move(work), std::move(storages));
}

// An all-reduce of ranks in one process. Its arguments are checked once: it runs again while its
// tensors lie where they lay. Engines bring calls(group), the CallCache.
template <typename Engine>
py::object all_reduce(const typename Engine::GroupPtr& group, const CallKey& key,
                      py::handle tensors, py::handle in_flight) {
  const auto prepare = [&](py::handle given) {
    return prepare_all_reduce(given, key.is_coalesced, key.reduction, key.algorithm,
                              Engine::ranks(*group));
  };
  if (!in_flight.is_none()) return run_or_submit<Engine>(group, prepare(tensors), in_flight);
  CallCache& calls = Engine::calls(*group);
  const TensorTuples tuples = CallCache::tuples_of(tensors, key.is_coalesced);
  if (const auto call = calls.find(key, tuples)) {
    Engine::host(*group).check_usable();
    for (const py::tuple& tuple : tuples) mark_written(tuple.ptr());
    Engine::run(*group, *call);
    return py::none();
  }
  // The tuples that the cache keeps the call for: the caller's lists may have changed.
  const bool is_refused = tuples.empty();
  PreparedCollective prepared = is_refused         ? prepare(tensors)
                                : key.is_coalesced ? prepare(py::cast(tuples))
                                                   : prepare(tuples[0]);
  Engine::host(*group).check_usable();
  mark_written(prepared.written.ptr());
  const auto call = std::make_shared<const Collective>(std::move(prepared.call));
  if (py::len(prepared.copies) == 0 && call->packed.empty()) calls.keep(key, tuples, call);
  Engine::run(*group, *call);
  copy_back(prepared.copies);
  return py::none();
}

// A call that was checked once, and whose tensors are compared each time with what they were.
template <typename Engine, typename Call>
struct BoundCall {
  typename Engine::GroupPtr group;
  Call call;
  BoundTensors tensors;

  static PyObject* run(PyObject* capsule, PyObject*) {
    try {
      BoundCall& bound = state_of<BoundCall>(capsule);
      PyObject* const written = bound.tensors.list();
      Engine::host(*bound.group).check_usable();
      bound.tensors.check();
      if constexpr (requires { Engine::mark_and_run(*bound.group, bound.call, written); }) {
        Engine::mark_and_run(*bound.group, bound.call, written);
      } else {
        mark_written(written);
        Engine::run(*bound.group, bound.call);
      }
    } catch (...) {
      set_python_error(std::current_exception());
      return nullptr;
    }
    Py_RETURN_NONE;
  }
};

template <typename Engine, typename Call>
py::object bind_call(const typename Engine::GroupPtr& group, Prepared<Call> prepared,
                     ListNames names) {
  using Bound = BoundCall<Engine, Call>;
  if (py::len(prepared.copies) > 0) {
    fail(ErrorKind::kUnsupported,
         "bind: on GPUs, tensors with gaps, or whose strides differ between ranks, cannot be "
         "bound; pass .contiguous() ones");
  }
  static PyMethodDef method = {"bound_all_reduce", &Bound::run, METH_NOARGS,
                               "Reduce the bound tensors in place."};
  BoundTensors tensors(std::move(prepared.written), names);
  return function_over(method, std::unique_ptr<Bound>(
                                   new Bound{group, std::move(prepared.call), std::move(tensors)}));
}

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

// -- ranks in one process -------------------------------------------------------------------------

// Engine brings, besides:
//   ranks(group)            how many there are, and where
//   calls(group)            the CallCache
//   wait_for_turn(group)    for the algorithms in Python: the next to run, as run() would be
template <typename Engine, typename Class>
void def_rank_calls(Class& cls) {
  using Ptr = const typename Engine::GroupPtr&;
  for (const bool are_lists : {false, true}) {
    const auto def = [&](const char* name, auto&& call) {
      cls.def(join(name, are_lists ? "_coalesced" : "").c_str(), call);
    };
    def("all_reduce", [are_lists](Ptr group, py::handle tensors, py::handle op,
                                  py::handle algorithm, py::handle order, py::handle in_flight) {
      const CallKey key{are_lists, parse_reduction(op, order), parse_algorithm(algorithm)};
      return all_reduce<Engine>(group, key, tensors, in_flight);
    });
    def("bind", [are_lists](Ptr group, py::handle tensors, py::handle op, py::handle algorithm,
                            py::handle order) {
      Engine::host(*group).check_usable();
      auto prepared = prepare_all_reduce(tensors, are_lists, parse_reduction(op, order),
                                         parse_algorithm(algorithm), Engine::ranks(*group), true);
      const std::size_t per_list = are_lists ? py::len(prepared.written) / py::len(tensors) : 0;
      return bind_call<Engine>(group, std::move(prepared),
                               {are_lists ? "lists" : "tensors", true, per_list});
    });
    def("check", [are_lists](Ptr group, py::handle tensors) {
      Engine::host(*group).check_usable();
      const PreparedCollective prepared = prepare_all_reduce(
          tensors, are_lists, Reduction{}, Algorithm::kFused, Engine::ranks(*group));
      Engine::wait_for_turn(*group);
    });
    def("reduce",
        [are_lists](Ptr group, py::handle output, py::handle inputs, py::handle op,
                    py::handle algorithm, py::handle order, int root, py::handle in_flight) {
          return run_or_submit<Engine>(
              group,
              prepare_reduce(output, inputs, are_lists, parse_reduction(op, order),
                             parse_algorithm(algorithm), root, Engine::ranks(*group)),
              in_flight);
        });
    def("broadcast", [are_lists](Ptr group, py::handle tensors, int root, py::handle in_flight) {
      return run_or_submit<Engine>(
          group, prepare_broadcast(tensors, are_lists, root, Engine::ranks(*group)), in_flight);
    });
  }
  // Of a bucket: after its gradients.
  cls.def("all_reduce_coalesced",
          [](Ptr group, py::handle lists, py::handle op, py::handle algorithm, py::handle order,
             py::handle in_flight, py::handle after) {
            return run_or_submit<Engine>(
                group,
                prepare_all_reduce(lists, true, parse_reduction(op, order),
                                   parse_algorithm(algorithm), Engine::ranks(*group)),
                in_flight, after);
          })
      .def("check_usable", [](Ptr group) { Engine::host(*group).check(); })
      .def("reduce_scatter",
           [](Ptr group, py::handle outputs, py::handle inputs, py::handle op, py::handle algorithm,
              py::handle order, py::handle in_flight) {
             return run_or_submit<Engine>(
                 group,
                 prepare_reduce_scatter(outputs, inputs, parse_reduction(op, order),
                                        parse_algorithm(algorithm), Engine::ranks(*group)),
                 in_flight);
           })
      .def("all_gather", [](Ptr group, py::handle outputs, py::handle inputs, py::handle algorithm,
                            py::handle in_flight) {
        return run_or_submit<Engine>(
            group,
            prepare_all_gather(outputs, inputs, parse_algorithm(algorithm), Engine::ranks(*group)),
            in_flight);
      });
}

// -- ranks in processes ---------------------------------------------------------------------------

// what: the call of other tensors that it stands for, in words; ranks compare it.
template <typename Engine>
py::object run_as(const typename Engine::GroupPtr& group, PreparedCall prepared,
                  py::handle in_flight, std::string what) {
  prepared.call.what = std::move(what);
  return run_or_submit<Engine>(group, std::move(prepared), in_flight);
}

// Engine brings, besides (host(group) is the ProcessGroup on the host):
//   local_rank(group)    its part in the group
template <typename Engine, typename Class>
void def_process_calls(Class& cls) {
  using Ptr = const typename Engine::GroupPtr&;
  const auto prepare = [](Ptr group, py::handle tensors, py::handle op, py::handle order,
                          const char* operation) {
    return prepare_process_all_reduce(Engine::local_rank(*group), tensors,
                                      parse_reduction(op, order), operation);
  };
  const auto no_other = py::arg("what") = "";
  cls.def("absent_ranks", [](Ptr group) { return Engine::host(*group).absent_ranks(); })
      .def("seal", [](Ptr group) { Engine::host(*group).seal(); })
      .def(
          "all_reduce",
          [prepare](Ptr group, py::handle tensors, py::handle op, py::handle order,
                    py::handle in_flight, std::string what) {
            return run_as<Engine>(group, prepare(group, tensors, op, order, "all_reduce"),
                                  in_flight, std::move(what));
          },
          py::arg("tensors"), py::arg("op"), py::arg("order"), py::arg("in_flight"), no_other)
      .def("reduce_scatter",
           [](Ptr group, py::handle output, py::handle input, py::handle op, py::handle order,
              py::handle in_flight) {
             return run_or_submit<Engine>(
                 group,
                 prepare_process_reduce_scatter(Engine::local_rank(*group), output, input,
                                                parse_reduction(op, order)),
                 in_flight);
           })
      .def(
          "all_gather",
          [](Ptr group, py::handle output, py::handle input, py::handle in_flight,
             std::string what) {
            return run_as<Engine>(
                group, prepare_process_all_gather(Engine::local_rank(*group), output, input),
                in_flight, std::move(what));
          },
          py::arg("output"), py::arg("input"), py::arg("in_flight"), no_other)
      .def(
          "broadcast",
          [](Ptr group, py::handle tensor, int root, py::handle in_flight, std::string what) {
            return run_as<Engine>(
                group, prepare_process_broadcast(Engine::local_rank(*group), tensor, root),
                in_flight, std::move(what));
          },
          py::arg("tensor"), py::arg("root"), py::arg("in_flight"), no_other)
      .def("barrier",
           [](Ptr group, py::handle in_flight) {
             return run_or_submit<Engine>(group, prepare_process_barrier(), in_flight);
           })
      .def("bind",
           [prepare](Ptr group, py::handle tensors, py::handle op, py::handle order) {
             Engine::host(*group).check_usable();
             const bool is_list = is_sequence(tensors.ptr());
             return bind_call<Engine>(group, prepare(group, tensors, op, order, "bind"),
                                      {is_list ? "tensors" : "tensor", is_list});
           })
      .def(
          "abort",
          [](Ptr group, const std::string& why) {
            const PythonCall python_call;
            if (!why.empty()) Engine::host(*group).leave_at_once(join("has left the group: ", why));
            return group->close(Leaving::kAborting);
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
             const ProcessPlan plan = group->plan(nbytes);
             py::dict dict;
             dict["algorithm"] = process_algorithm_name(plan.algorithm);
             dict["num_pieces"] = plan.num_pieces;
             return dict;
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
