// bucketer: the gradient bucketer as Python sees it, and the hooks that parameters call.
//
// Floor     bindings; included by module.cpp alone, which has read the whole of pybind11 already.
// Contract  a hook is a plain C function that counts one gradient; Python is called once for each
//           complete bucket, and when something is wrong. How a backward pass begins and ends, and
//           how a step does, is one call each in here, which no interrupt can split: a signal's
//           handler runs between the steps of Python code only.
// Threads   with the GIL held.
// Tests     tests/test_bucketing.py, tests/test_bucketing_interrupts.py
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "bindings/convert.h"
#include "bucket/bucketer.h"

namespace pyringar {

// What Python is told. Callables take: on_complete(bucket, sent), on_trouble(what, rank, param,
// pass), whose exceptions come out of backward(), and on_failed() once a pass has failed.
struct Callbacks {
  py::object on_complete;
  py::object on_trouble;
  py::object on_failed;
};

struct BoundBucketer {
  Bucketer core;
  Callbacks callbacks;
  py::object current_task;  // torch's, C functions both
  py::object queue_callback;
  bool is_counting = true;
  int num_retired = 0;  // times that all hooks were: those made before count nothing
  bool is_first_step = true;
  bool is_waiting = false;
  // False from the end of a step until the owner has returned from the wait for it, or a new pass
  // begins: whoever was interrupted in between may ask for the same step again.
  bool is_reported = true;
  py::dict sent = py::dict();  // the owner's, of this step: what has left, by bucket
  // Steps that were broken off, until the owner has seen to them: tuples of the reason, `sent`,
  // whether a pass was spared, and whether the other processes know.
  py::list unsettled = py::list();
};
using BucketerPtr = std::shared_ptr<BoundBucketer>;

// The number of the backward pass that calls this hook; torch counts from 0.
inline std::int64_t current_pass(const BoundBucketer& bucketer) {
  const auto id =
      py::reinterpret_steal<py::object>(PyObject_CallNoArgs(bucketer.current_task.ptr()));
  const long long number = id ? PyLong_AsLongLong(id.ptr()) : -1;
  if (PyErr_Occurred() != nullptr) throw_python_error();
  return number + 1;
}

// Whether compiled autograd runs this backward pass. It never calls back: nothing may depend on the
// end of its passes.
inline bool in_compiled_autograd() {
  PyObject* module =
      PyDict_GetItemString(PyImport_GetModuleDict(), "torch._dynamo.compiled_autograd");
  return module != nullptr && py::reinterpret_borrow<py::object>(module)
                                  .attr("in_compiled_autograd_region")
                                  .cast<bool>();
}

// Ends the step: what it has sent, and which gradients it leaves, is for the owner to see to.
inline void break_off(BoundBucketer& bucketer, const py::str& reason, std::int64_t spared_pass,
                      bool is_known) {
  py::dict next;
  bucketer.unsettled.append(py::make_tuple(reason, bucketer.sent, spared_pass != 0, is_known));
  bucketer.core.break_off(spared_pass);
  bucketer.sent = std::move(next);
}

// True if the step `sent` is over; false if it was broken off meanwhile. `order` plans the next.
inline bool finish(BoundBucketer& bucketer, const py::dict& sent,
                   const std::optional<std::vector<int>>& order) {
  if (!bucketer.sent.is(sent)) return false;
  py::dict next;
  if (order) {
    bucketer.core.plan(*order);
    bucketer.is_first_step = false;
  } else {
    bucketer.core.reset();
  }
  bucketer.is_reported = false;
  bucketer.sent = std::move(next);
  return true;
}

// Calls wait(), and returns true; false where that is being called already.
inline bool wait_alone(const BucketerPtr& bucketer, const py::object& wait) {
  if (bucketer->is_waiting) return false;
  struct Waiting {
    bool& flag;
    explicit Waiting(bool& f) : flag(f) { flag = true; }
    ~Waiting() { flag = false; }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
  };
  const Waiting waiting(bucketer->is_waiting);
  wait();
  return true;
}

// -- how a backward pass ends -----------------------------------------------------------------

// Torch calls it after a pass that went well. One that failed only drops it, together with all else
// that belongs to the pass: before backward() raises, save that a thread of a GPU that still works
// for the pass may be a little late.
struct PassEnd {
  BucketerPtr bucketer;
  std::int64_t pass;
};

inline constexpr const char* kPassEndCapsule = "pyringar.pass_end";

inline PyObject* call_pass_end(PyObject* capsule, PyObject*) {
  const auto* end = static_cast<PassEnd*>(PyCapsule_GetPointer(capsule, kPassEndCapsule));
  end->bucketer->core.end_pass(end->pass);
  Py_RETURN_NONE;
}

inline int raise_in_main_thread(void* error) {
  const auto value = py::reinterpret_steal<py::object>(static_cast<PyObject*>(error));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
  return -1;
}

inline void drop_pass_end(PyObject* capsule) {
  const std::unique_ptr<PassEnd> end(
      static_cast<PassEnd*>(PyCapsule_GetPointer(capsule, kPassEndCapsule)));
  BoundBucketer& bucketer = *end->bucketer;
  if (!bucketer.core.end_pass(end->pass)) return;  // it went well, or its step is broken off
  const py::error_scope what_backward_raises;
  try {
    break_off(bucketer, "a backward pass failed", 0, false);
    bucketer.callbacks.on_failed();
  } catch (py::error_already_set& error) {
    // An interrupt, as a rule. Nothing can be raised in here: once backward() has raised.
    PyObject* value = error.value().inc_ref().ptr();
    if (Py_AddPendingCall(&raise_in_main_thread, value) != 0) {
      error.restore();
      PyErr_WriteUnraisable(capsule);
      Py_DECREF(value);
    }
  }
}

// Whether the end of the pass that calls will be noticed.
inline bool begin_pass(const BucketerPtr& bucketer, std::int64_t pass) {
  if (!bucketer->core.begin_pass(pass)) return true;
  bucketer->is_reported = true;
  if (in_compiled_autograd()) {
    bucketer->core.end_pass(pass);
    return false;
  }
  static PyMethodDef method = {"pass_end", &call_pass_end, METH_NOARGS, "The pass went well."};
  const py::capsule capsule(new PassEnd{bucketer, pass}, kPassEndCapsule, &drop_pass_end);
  const auto end = py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
  try {
    bucketer->queue_callback(end);
  } catch (...) {
    bucketer->core.end_pass(pass);
    throw;
  }
  return true;
}

inline void count(const BucketerPtr& bucketer, int rank, int param) {
  if (!bucketer->is_counting) return;
  Bucketer& core = bucketer->core;
  const std::int64_t pass = current_pass(*bucketer);
  if (core.is_broken(pass)) return;
  const bool has_end = begin_pass(bucketer, pass);
  Mark mark = core.mark(rank, param, pass);
  if (mark == Mark::kStillRuns || mark == Mark::kAfterLaunch) {
    // Raises, or has started over: then this gradient is the first of a new step. What this pass
    // had marked before is found by wait(); what it has sent would be reduced twice.
    const char* what = mark == Mark::kStillRuns  ? "still runs"
                       : core.has_launched(pass) ? "launched by this pass"
                                                 : "launched";
    bucketer->callbacks.on_trouble(what, rank, param, pass);
    mark = core.mark(rank, param, pass);
  }
  if (mark == Mark::kComplete && has_end) {
    bucketer->callbacks.on_complete(core.bucket_of(param), bucketer->sent);
  }
}

struct Hook {
  BucketerPtr bucketer;
  int rank;
  int param;
  int num_retired;
};

inline constexpr const char* kHookCapsule = "pyringar.hook";

inline PyObject* call_hook(PyObject* capsule, PyObject*) {
  try {
    const auto* hook = static_cast<const Hook*>(PyCapsule_GetPointer(capsule, kHookCapsule));
    const bool is_retired = hook->num_retired != hook->bucketer->num_retired;
    if (!is_retired) count(hook->bucketer, hook->rank, hook->param);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
  Py_RETURN_NONE;
}

inline py::object make_hook(const BucketerPtr& bucketer, int rank, int param) {
  static PyMethodDef method = {"gradient_ready", &call_hook, METH_O, "Count one gradient."};
  const py::capsule capsule(
      new Hook{bucketer, rank, param, bucketer->num_retired}, kHookCapsule,
      [](PyObject* c) { delete static_cast<Hook*>(PyCapsule_GetPointer(c, kHookCapsule)); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
}

inline BucketerPtr make_bucketer(int world_size,
                                 const std::vector<std::pair<std::size_t, int>>& items,
                                 std::size_t first_cap_bytes, std::size_t cap_bytes,
                                 py::object on_complete, py::object on_trouble,
                                 py::object on_failed) {
  std::vector<BucketItem> parsed;
  for (const auto& [bytes, kind] : items) parsed.push_back({bytes, kind});
  const py::object variable = py::module_::import("torch.autograd").attr("Variable");
  return BucketerPtr(
      new BoundBucketer{Bucketer(world_size, std::move(parsed), first_cap_bytes, cap_bytes),
                        {std::move(on_complete), std::move(on_trouble), std::move(on_failed)},
                        py::module_::import("torch._C").attr("_current_graph_task_id"),
                        variable.attr("_execution_engine").attr("queue_callback")});
}

inline void bind_bucketer(py::module_& m) {
  py::class_<BoundBucketer, BucketerPtr>(m, "Bucketer")
      .def(py::init(&make_bucketer), py::arg("world_size"), py::arg("items"),
           py::arg("first_cap_bytes"), py::arg("cap_bytes"), py::arg("on_complete"),
           py::arg("on_trouble"), py::arg("on_failed"))
      .def("hook", &make_hook, py::arg("rank"), py::arg("param"))
      .def("retire_hooks", [](BoundBucketer& b) { ++b.num_retired; })
      .def_readwrite("is_counting", &BoundBucketer::is_counting)
      .def_readwrite("is_reported", &BoundBucketer::is_reported)
      .def_readonly("is_first_step", &BoundBucketer::is_first_step)
      .def_readonly("sent", &BoundBucketer::sent)
      .def_readonly("unsettled", &BoundBucketer::unsettled)
      .def("buckets", [](BoundBucketer& b) { return b.core.buckets(); })
      .def("bytes_of", [](BoundBucketer& b, int bucket) { return b.core.bytes_of(bucket); })
      .def("launched",
           [](BoundBucketer& b, int bucket, const py::dict& sent) {
             if (b.sent.is(sent)) b.core.launched(bucket);
           })
      .def("is_launched", [](BoundBucketer& b, int bucket) { return b.core.is_launched(bucket); })
      .def("has_marks", [](BoundBucketer& b) { return b.core.has_marks(); })
      .def("begin_ns", [](BoundBucketer& b) { return b.core.begin_ns(); })
      .def("times",
           [](BoundBucketer& b) {
             py::list rows;
             for (const BucketTimes& t : b.core.times()) {
               rows.append(py::make_tuple(t.ready_ns, t.launched_ns));
             }
             return rows;
           })
      .def("is_marked",
           [](BoundBucketer& b, int rank, int param) { return b.core.is_marked(rank, param); })
      .def(
          "take_turn", [](BoundBucketer& b, bool has_sent) { return b.core.take_turn(has_sent); },
          py::arg("has_sent"))
      .def("break_off", &break_off, py::arg("reason"), py::arg("spared_pass"), py::arg("is_known"))
      .def("finish", &finish, py::arg("sent"), py::arg("order"))
      .def("wait_alone", &wait_alone, py::arg("wait"))
      .def("has_unfinished_pass", [](BoundBucketer& b) { return b.core.has_unfinished_pass(); })
      .def("ready_order", [](BoundBucketer& b) { return b.core.ready_order(); });
  m.def("plan_buckets",
        [](const std::vector<std::pair<std::size_t, int>>& items, const std::vector<int>& order,
           std::size_t first_cap_bytes, std::size_t cap_bytes) {
          std::vector<BucketItem> parsed;
          for (const auto& [bytes, kind] : items) parsed.push_back({bytes, kind});
          return plan_buckets(parsed, order, first_cap_bytes, cap_bytes);
        });
}

}  // namespace pyringar
