// bucketer: the gradient bucketer as Python sees it, and the hooks that parameters call.
//
// Floor     bindings; included by module.cpp alone, which has read the whole of pybind11 already.
// Contract  a hook is a plain C function that counts one gradient; Python is called once for each
//           gradient that is another tensor than the hook saw last, for each complete bucket, and
//           when something is wrong. How a backward pass begins and ends, and how a step does, is
//           one call each in here, which no interrupt can split: a signal's handler runs between
//           the steps of Python code only. Hooks in Python, which cost a training step no time that
//           can be measured, would lose passes that are interrupted.
// Threads   with the GIL held.
// Tests     tests/test_bucketing.py, tests/test_bucketing_interrupts.py,
//           tests/test_shared_gradients.py
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>

#include "bindings/convert.h"
#include "bucket/ready_hook.h"
#include "bucket/step.h"

namespace pyringar {

// What Python is told. Callables take: on_complete(step, bucket), None if all buckets leave in
// wait(); on_trouble(mark, rank, param, pass), whose exceptions come out of backward(); on_failed()
// once a pass has failed; and on_new(parameter) where its gradient is a new tensor, for which it
// may put another.
//
// make_ready(sizes of the buckets): a C function that returns what notes gradients on GPUs, or
// None.
struct Callbacks {
  py::object on_complete;
  py::object on_trouble;
  py::object on_failed;
  py::object on_new;
  py::object make_ready;
};

// One step: its counts, and what its owner notes.
struct BoundStep {
  Step core;
  py::list buckets;
  py::dict sent = py::dict();  // what has left, by bucket
  bool has_new_params = false;
  py::object ready = py::none();  // from when on gradients are there, on GPUs
  const ReadyHook* ready_hook = nullptr;
};
using StepPtr = std::shared_ptr<BoundStep>;

struct BoundBucketer {
  const int world_size;
  const int num_params;
  const bool in_turns;  // buckets leave in the order of the plan, the last one in wait()
  Callbacks callbacks;
  py::object current_task;  // torch's, C functions both
  py::object queue_callback;
  StepPtr step;
  Passes passes = {};
  bool is_counting = true;
  int num_retired = 0;  // times that all hooks were: those made before count nothing
  bool is_first_step = true;
  bool is_waiting = false;
  // False from the end of a step until the owner has returned from the wait for it, or a new pass
  // begins: a caller that was interrupted in between may ask for the same step again.
  bool is_reported = true;
  // Steps that were broken off, until the owner has seen to them: tuples of the reason, the step,
  // whether a pass was spared, and whether the other processes know.
  py::list unsettled = py::list();
};
using BucketerPtr = std::shared_ptr<BoundBucketer>;

// before: the step before, or none.
inline StepPtr new_step(int world_size, int num_params, const Callbacks& callbacks,
                        const py::list& buckets, const StepPtr& before = nullptr) {
  const auto plan = buckets.cast<std::vector<Bucket>>();
  StepPtr step(new BoundStep{Step(world_size, num_params, plan), buckets});
  if (callbacks.make_ready.is_none()) return step;
  if (before != nullptr && before->buckets.is(buckets)) {
    step->ready = before->ready;
    step->ready_hook = before->ready_hook;
  } else {
    py::list sizes;
    for (const Bucket& bucket : plan) sizes.append(bucket.size());
    step->ready = callbacks.make_ready(sizes);
    const py::object capsule = step->ready.attr("hook")();
    step->ready_hook =
        static_cast<const ReadyHook*>(PyCapsule_GetPointer(capsule.ptr(), ReadyHook::kCapsule));
    if (step->ready_hook == nullptr) throw_python_error();
  }
  step->ready_hook->start_step(step->ready_hook->self);
  return step;
}

inline void note_ready(const BoundStep& step, int rank, int param, bool is_new) {
  if (step.ready_hook == nullptr) return;
  const int bucket = step.core.bucket_of(param);
  if (!step.ready_hook->note(step.ready_hook->self, bucket, rank, is_new)) throw_python_error();
}

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
  StepPtr next = new_step(bucketer.world_size, bucketer.num_params, bucketer.callbacks,
                          bucketer.step->buckets, bucketer.step);
  bucketer.unsettled.append(py::make_tuple(reason, bucketer.step, spared_pass != 0, is_known));
  bucketer.passes.break_off(spared_pass);
  bucketer.step = std::move(next);
}

// True if `step` is over; false if it was broken off meanwhile. `buckets` are the next one's.
inline bool finish(BoundBucketer& bucketer, const StepPtr& step,
                   const std::optional<py::list>& buckets) {
  if (bucketer.step != step) return false;
  StepPtr next = new_step(bucketer.world_size, bucketer.num_params, bucketer.callbacks,
                          buckets ? *buckets : step->buckets, step);
  if (buckets) bucketer.is_first_step = false;
  bucketer.passes.forget_running();
  bucketer.is_reported = false;
  bucketer.step = std::move(next);
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
  end->bucketer->passes.end(end->pass);
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
  if (!bucketer.passes.end(end->pass)) return;  // it went well, or its step is broken off
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
  if (!bucketer->passes.begin(pass)) return true;
  bucketer->is_reported = true;
  if (in_compiled_autograd()) {
    bucketer->passes.end(pass);
    return false;
  }
  static PyMethodDef method = {"pass_end", &call_pass_end, METH_NOARGS, "The pass went well."};
  const py::capsule capsule(new PassEnd{bucketer, pass}, kPassEndCapsule, &drop_pass_end);
  const auto end = py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
  try {
    bucketer->queue_callback(end);
  } catch (...) {
    bucketer->passes.end(pass);
    throw;
  }
  return true;
}

// Hands over what is complete: `bucket`, or those whose turn it is.
inline void complete(const BucketerPtr& bucketer, int bucket) {
  const py::object& on_complete = bucketer->callbacks.on_complete;
  if (on_complete.is_none()) return;
  const StepPtr step = bucketer->step;
  if (!bucketer->in_turns) {
    on_complete(step, bucket);
    return;
  }
  int turn = step->core.take_turn(false);
  while (turn >= 0 && bucketer->step == step) {
    on_complete(step, turn);
    turn = step->core.take_turn(true);
  }
}

struct Hook {
  BucketerPtr bucketer;
  int rank;
  int param;
  int num_retired;
  py::object seen;  // a weak reference to the gradient that was there last; None: there was none
};

inline py::object weak(const py::object& grad) {
  if (grad.is_none()) return grad;
  const auto ref = py::reinterpret_steal<py::object>(PyWeakref_NewRef(grad.ptr(), nullptr));
  if (!ref) throw_python_error();
  return ref;
}

// A gradient that was there before is the user's to share: backward has added to it in place.
inline void look_at(Hook& hook, py::handle param) {
  const py::object grad = param.attr("grad");
  if (!hook.seen.is_none() && hook.seen().is(grad)) return;
  hook.bucketer->callbacks.on_new(param);
  hook.seen = weak(param.attr("grad"));
}

inline void count(Hook& hook, py::handle tensor) {
  const BucketerPtr& bucketer = hook.bucketer;
  if (!bucketer->is_counting) {
    look_at(hook, tensor);
    return;
  }
  const std::int64_t pass = current_pass(*bucketer);
  if (bucketer->passes.is_broken(pass)) return;
  const bool has_end = begin_pass(bucketer, pass);
  look_at(hook, tensor);
  if (bucketer->passes.is_broken(pass)) return;  // by another thread, meanwhile
  Mark mark = bucketer->step->core.mark(hook.rank, hook.param, pass, bucketer->passes);
  if (mark >= Mark::kStillRuns) {
    // Raises, or has started over: then this gradient is the first of a new step. What this pass
    // had marked before is found by wait(); what it has sent would be reduced twice.
    bucketer->callbacks.on_trouble(mark, hook.rank, hook.param, pass);
    mark = bucketer->step->core.mark(hook.rank, hook.param, pass, bucketer->passes);
  }
  if (mark < Mark::kStillRuns) {
    note_ready(*bucketer->step, hook.rank, hook.param, mark != Mark::kAgain);
  }
  if (mark == Mark::kComplete && has_end) {
    complete(bucketer, bucketer->step->core.bucket_of(hook.param));
  }
}

inline constexpr const char* kHookCapsule = "pyringar.hook";

// Torch calls hooks also of a parameter that the pass has come to without a gradient: an output
// that no loss uses, a function that returns None. Where there are other hooks, one of them may
// have taken the gradient away: that is not let pass.
inline bool is_unused(py::handle param) {
  if (!param.attr("grad").is_none()) return false;
  return py::len(param.attr("_post_accumulate_grad_hooks")) == 1;
}

inline PyObject* call_hook(PyObject* capsule, PyObject* param) {
  try {
    auto* hook = static_cast<Hook*>(PyCapsule_GetPointer(capsule, kHookCapsule));
    const bool is_retired = hook->num_retired != hook->bucketer->num_retired;
    if (!is_retired && !is_unused(param)) count(*hook, param);
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
  Py_RETURN_NONE;
}

// grad: the parameter's gradient now, or None.
inline py::object make_hook(const BucketerPtr& bucketer, int rank, int param,
                            const py::object& grad) {
  static PyMethodDef method = {"gradient_ready", &call_hook, METH_O, "Count one gradient."};
  const py::capsule capsule(
      new Hook{bucketer, rank, param, bucketer->num_retired, weak(grad)}, kHookCapsule,
      [](PyObject* c) { delete static_cast<Hook*>(PyCapsule_GetPointer(c, kHookCapsule)); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
}

inline BucketerPtr make_bucketer(int world_size, int num_params, const py::list& buckets,
                                 bool in_turns, py::object on_complete, py::object on_trouble,
                                 py::object on_failed, py::object on_new, py::object make_ready) {
  const py::object variable = py::module_::import("torch.autograd").attr("Variable");
  Callbacks callbacks{std::move(on_complete), std::move(on_trouble), std::move(on_failed),
                      std::move(on_new), std::move(make_ready)};
  StepPtr first = new_step(world_size, num_params, callbacks, buckets);
  return BucketerPtr(new BoundBucketer{
      world_size, num_params, in_turns, std::move(callbacks),
      py::module_::import("torch._C").attr("_current_graph_task_id"),
      variable.attr("_execution_engine").attr("queue_callback"), std::move(first)});
}

inline void bind_step(py::module_& m) {
  py::enum_<Mark>(m, "Mark")
      .value("STILL_RUNS", Mark::kStillRuns)
      .value("AFTER_LAUNCH", Mark::kAfterLaunch)
      .value("AFTER_OWN_LAUNCH", Mark::kAfterOwnLaunch);
  py::class_<BoundStep, StepPtr>(m, "Step")
      .def_readonly("buckets", &BoundStep::buckets)
      .def_readonly("sent", &BoundStep::sent)
      .def_readwrite("has_new_params", &BoundStep::has_new_params)
      // Noted before it leaves: it may be done when the call that sends it returns.
      .def("launch",
           [](BoundStep& s, int bucket, const py::object& sent) {
             s.core.launched(bucket);
             s.sent[py::int_(bucket)] = sent;
           })
      // What says when a complete bucket's gradients are there, for the call that reduces it.
      .def("after",
           [](const BoundStep& s, int bucket) -> py::object {
             if (s.ready.is_none()) return py::none();
             return py::make_tuple(s.ready, bucket);
           })
      .def("has_marks", [](const BoundStep& s) { return s.core.begin_ns() != 0; })
      .def("is_marked",
           [](const BoundStep& s, int rank, int param) { return s.core.is_marked(rank, param); })
      .def("ready", [](const BoundStep& s) { return s.core.ready(); })
      .def("begin_ns", [](const BoundStep& s) { return s.core.begin_ns(); })
      .def("times", [](const BoundStep& s) {
        py::list rows;
        for (const BucketProgress& bucket : s.core.buckets()) {
          rows.append(py::make_tuple(bucket.ready_ns, bucket.launched_ns));
        }
        return rows;
      });
}

inline void bind_bucketer(py::module_& m) {
  bind_step(m);
  py::class_<BoundBucketer, BucketerPtr>(m, "Bucketer")
      .def(py::init(&make_bucketer), py::arg("world_size"), py::arg("num_params"),
           py::arg("buckets"), py::arg("in_turns"), py::arg("on_complete"), py::arg("on_trouble"),
           py::arg("on_failed"), py::arg("on_new"), py::arg("make_ready"))
      .def("hook", &make_hook, py::arg("rank"), py::arg("param"), py::arg("grad"))
      .def("retire_hooks", [](BoundBucketer& b) { ++b.num_retired; })
      .def_readwrite("is_counting", &BoundBucketer::is_counting)
      .def_readwrite("is_reported", &BoundBucketer::is_reported)
      .def_readonly("is_first_step", &BoundBucketer::is_first_step)
      .def_readonly("step", &BoundBucketer::step)
      .def_readonly("unsettled", &BoundBucketer::unsettled)
      .def("break_off", &break_off, py::arg("reason"), py::arg("spared_pass"), py::arg("is_known"))
      .def("finish", &finish, py::arg("step"), py::arg("buckets"))
      .def("wait_alone", &wait_alone, py::arg("wait"))
      .def("has_unfinished_pass", [](const BoundBucketer& b) { return b.passes.any_running(); });
  m.def(
      "plan_buckets",
      [](const std::vector<std::pair<std::size_t, int>>& items, const std::vector<int>& order,
         std::size_t first_cap_bytes, std::size_t cap_bytes) {
        std::vector<BucketItem> parsed;
        for (const auto& [bytes, kind] : items) parsed.push_back({bytes, kind});
        return plan_buckets(parsed, order, first_cap_bytes, cap_bytes);
      },
      py::arg("items"), py::arg("order"), py::arg("first_cap_bytes"), py::arg("cap_bytes"));
}

}  // namespace pyringar
