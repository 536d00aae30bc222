// bucketer: the Python class `Bucketer`, and the hooks that parameters call.
//
// Floor     bindings; included by module.cpp alone, after pybind11.
// Contract  the hook after accumulation counts the gradient, and launches its bucket when that is
//           complete. The hook before accumulation sets a gradient to zero that holds the sum of
//           an earlier step: see Held.
// Threads   with the GIL held.
// Tests     tests/test_bucketing.py, tests/test_bucketing_failures.py,
//           tests/test_bucketing_sums.py
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <set>

#include "bindings/convert.h"
#include "bucket/ready_hook.h"
#include "bucket/step.h"

namespace pyringar {

// What a gradient holds, as in bucket_step.py. A sum is added once: rank 0 accumulates on top of
// it, the other ranks from zero.
enum class Held : std::uint8_t {
  kOther,  // no pass has added to it
  kPart,   // what this rank's passes added since the last reduction
  kSum,    // the reduced sum
};

struct BoundBucketer {
  const int world_size;  // ranks of this process
  const int num_params;
  const int first_rank;    // of this process in the group, for messages
  const bool in_order;     // buckets are launched in the order of the plan
  py::object on_complete;  // (bucket): launches it; None: wait() launches all buckets
  py::object on_failed;    // (): a backward pass has failed
  py::object on_new;       // (parameter): its gradient is a new tensor
  py::object make_ready;   // (sizes of buckets): the GPU events of a step; None without GPUs
  py::object current_task;
  py::object queue_callback;
  std::vector<Bucket> plan;
  Step step;
  std::vector<Held> held;              // by rank and parameter
  std::set<std::int64_t> passes = {};  // backward passes that run
  bool is_counting = true;
  bool is_closed = false;  // hooks do nothing
  py::object ready = py::none();
  const ReadyHook* ready_hook = nullptr;

  Held& held_at(int rank, int param) {
    return held.at(static_cast<std::size_t>(rank * num_params + param));
  }
};
using BucketerPtr = std::shared_ptr<BoundBucketer>;

inline void start_ready(BoundBucketer& bucketer, bool is_new_plan) {
  if (bucketer.make_ready.is_none()) return;
  if (is_new_plan) {
    py::list sizes;
    for (const Bucket& bucket : bucketer.plan) sizes.append(bucket.size());
    bucketer.ready = bucketer.make_ready(sizes);
    const py::capsule hook = bucketer.ready.attr("hook")();
    bucketer.ready_hook = hook.get_pointer<const ReadyHook>();
  }
  bucketer.ready_hook->start_step(bucketer.ready_hook->self);
}

// reduced: parameters whose gradients are sums now. plan: of the next step, if it changes.
inline void finish_step(BoundBucketer& bucketer, const std::vector<int>& reduced,
                        const std::optional<std::vector<Bucket>>& plan) {
  for (int rank = 0; rank < bucketer.world_size; ++rank) {
    for (const int param : reduced) bucketer.held_at(rank, param) = Held::kSum;
  }
  if (plan) bucketer.plan = *plan;
  bucketer.step = Step(bucketer.world_size, bucketer.num_params, bucketer.plan);
  start_ready(bucketer, plan.has_value());
}

// -- backward passes ------------------------------------------------------------------------------

// torch calls a callback after a pass that succeeded. After a failed pass, torch drops it uncalled.
struct PassEnd {
  BucketerPtr bucketer;
  std::int64_t pass;

  void succeed() const { bucketer->passes.erase(pass); }
  ~PassEnd() {
    if (bucketer->passes.erase(pass) == 0) return;  // it succeeded
    const py::error_scope error_of_backward;
    for (int attempt = 0; attempt < 2; ++attempt) {  // a signal may end the first
      try {
        bucketer->on_failed();
        return;
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("the end of a backward pass that failed");
      }
    }
  }
};

// Compiled autograd calls no callback at the end of a pass.
inline bool in_compiled_autograd() {
  PyObject* module =
      PyDict_GetItemString(PyImport_GetModuleDict(), "torch._dynamo.compiled_autograd");
  return module != nullptr && py::reinterpret_borrow<py::object>(module)
                                  .attr("in_compiled_autograd_region")
                                  .cast<bool>();
}

// Returns whether the end of the running pass will be noticed.
inline bool begin_pass(const BucketerPtr& bucketer) {
  const auto pass = bucketer->current_task().cast<std::int64_t>();
  if (bucketer->passes.count(pass) > 0) return true;
  if (in_compiled_autograd()) return false;
  const std::shared_ptr<PassEnd> end(new PassEnd{bucketer, pass});
  bucketer->queue_callback(py::cpp_function([end] { end->succeed(); }));
  bucketer->passes.insert(pass);
  return true;
}

// -- hooks ----------------------------------------------------------------------------------------

struct Hook {
  BucketerPtr bucketer;
  int rank;
  int param;
  py::object ref;  // a weak reference, or None; see the two hooks
};

inline py::object weak(const py::object& object) {
  if (object.is_none()) return object;
  return py::weakref(object);
}

// Before accumulation: the sum of an earlier step must not be added once for each rank.
// hook.ref: the parameter.
inline void zero_sum(Hook& hook, py::handle) {
  Held& held = hook.bucketer->held_at(hook.rank, hook.param);
  if (held != Held::kSum) return;
  held = Held::kPart;
  const py::object param = hook.ref();
  const py::object grad = param.is_none() ? param : param.attr("grad");
  if (!grad.is_none()) grad.attr("detach")().attr("zero_")();
}

inline void launch_complete(BoundBucketer& bucketer, int bucket) {
  if (!bucketer.in_order) {
    bucketer.on_complete(bucket);
    return;
  }
  int next = bucketer.step.take_next(false);
  while (next >= 0 && !bucketer.is_closed) {
    bucketer.on_complete(next);
    next = bucketer.step.take_next(true);
  }
}

// torch calls the hook also if a pass has no gradient for the parameter. If there are other hooks,
// a hook may have removed the gradient, which is an error.
inline bool has_no_gradient(py::handle param) {
  return param.attr("grad").is_none() && py::len(param.attr("_post_accumulate_grad_hooks")) == 1;
}

// hook.ref: the gradient that was there last.
inline void count(Hook& hook, py::handle param) {
  if (has_no_gradient(param)) return;
  BoundBucketer& bucketer = *hook.bucketer;
  const int bucket = bucketer.step.bucket_of(hook.param);
  const bool may_launch =
      bucketer.is_counting && !bucketer.on_complete.is_none() && begin_pass(hook.bucketer);
  if (bucketer.step.is_launched(bucket)) {
    fail(ErrorKind::kState, "parameter ", hook.param, " of rank ", bucketer.first_rank + hook.rank,
         " got a gradient after its bucket was launched: put all backward passes of a step but the "
         "last into no_sync(), call wait() before the next step begins, or make the bucketer with "
         "overlap=False");
  }
  const py::object grad = param.attr("grad");
  if (hook.ref.is_none() || !hook.ref().is(grad)) {
    bucketer.on_new(param);
    hook.ref = weak(param.attr("grad"));
  }
  bucketer.held_at(hook.rank, hook.param) = Held::kPart;
  if (!bucketer.is_counting) return;
  const Mark mark = bucketer.step.mark(hook.rank, hook.param);
  if (bucketer.ready_hook != nullptr) {
    const ReadyHook& ready = *bucketer.ready_hook;
    if (!ready.note(ready.self, bucket, hook.rank, mark != Mark::kAgain)) throw_python_error();
  }
  if (mark == Mark::kComplete && may_launch) launch_complete(bucketer, bucket);
}

// A C function: the calls of a py::cpp_function cost a microsecond more per gradient.
template <void (*kFunction)(Hook&, py::handle)>
PyObject* call_hook(PyObject* capsule, PyObject* tensor) {
  try {
    auto* hook = static_cast<Hook*>(PyCapsule_GetPointer(capsule, nullptr));
    if (!hook->bucketer->is_closed) kFunction(*hook, tensor);
    Py_RETURN_NONE;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    set_python_error(std::current_exception());
  }
  return nullptr;
}

inline py::object make_hook(const BucketerPtr& bucketer, int rank, int param,
                            const py::object& object, bool is_before) {
  static PyMethodDef before = {"before_gradient", &call_hook<&zero_sum>, METH_O, nullptr};
  static PyMethodDef after = {"gradient_ready", &call_hook<&count>, METH_O, nullptr};
  const py::capsule capsule(new Hook{bucketer, rank, param, weak(object)},
                            [](void* hook) { delete static_cast<Hook*>(hook); });
  return py::reinterpret_steal<py::object>(
      PyCFunction_New(is_before ? &before : &after, capsule.ptr()));
}

// -- the Python class -----------------------------------------------------------------------------

inline BucketerPtr make_bucketer(int world_size, int num_params, int first_rank,
                                 std::vector<Bucket> plan, bool in_order, py::object on_complete,
                                 py::object on_failed, py::object on_new, py::object make_ready) {
  const py::object variable = py::module_::import("torch.autograd").attr("Variable");
  Step step(world_size, num_params, plan);
  BucketerPtr bucketer(new BoundBucketer{
      world_size, num_params, first_rank, in_order, std::move(on_complete), std::move(on_failed),
      std::move(on_new), std::move(make_ready),
      py::module_::import("torch._C").attr("_current_graph_task_id"),
      variable.attr("_execution_engine").attr("queue_callback"), std::move(plan), std::move(step),
      std::vector<Held>(static_cast<std::size_t>(world_size * num_params), Held::kOther)});
  start_ready(*bucketer, true);
  return bucketer;
}

inline std::vector<int> held_of(BoundBucketer& bucketer, int rank, const std::vector<int>& params) {
  std::vector<int> found;
  for (const int param : params) {
    found.push_back(static_cast<int>(bucketer.held_at(rank, param)));
  }
  return found;
}

inline std::vector<std::pair<std::int64_t, std::int64_t>> times_of(const BoundBucketer& bucketer) {
  std::vector<std::pair<std::int64_t, std::int64_t>> rows;
  for (const auto& bucket : bucketer.step.buckets()) {
    rows.emplace_back(bucket.ready_ns, bucket.launched_ns);
  }
  return rows;
}

inline void bind_bucketer(py::module_& m) {
  using Self = const BoundBucketer&;
  py::class_<BoundBucketer, BucketerPtr>(m, "Bucketer")
      .def(py::init(&make_bucketer), py::arg("world_size"), py::arg("num_params"),
           py::arg("first_rank"), py::arg("plan"), py::arg("in_order"), py::arg("on_complete"),
           py::arg("on_failed"), py::arg("on_new"), py::arg("make_ready"))
      .def("make_hook", &make_hook, py::arg("rank"), py::arg("param"), py::arg("object"),
           py::arg("is_before"))
      .def_readwrite("is_counting", &BoundBucketer::is_counting)
      .def_readwrite("is_closed", &BoundBucketer::is_closed)
      .def_readonly("ready", &BoundBucketer::ready)
      .def("is_running", [](Self b) { return !b.passes.empty(); })
      .def("is_marked", [](Self b, int rank, int param) { return b.step.is_marked(rank, param); })
      .def("held", &held_of)
      .def("set_launched", [](BoundBucketer& b, int bucket) { b.step.set_launched(bucket); })
      .def("finish_step", &finish_step, py::arg("reduced"), py::arg("plan"))
      .def("order", [](Self b) { return b.step.order(); })
      .def("begin_ns", [](Self b) { return b.step.begin_ns(); })
      .def("times", &times_of);
  m.def("plan_buckets", &plan_buckets, py::arg("items"), py::arg("order"),
        py::arg("first_cap_bytes"), py::arg("cap_bytes"));
}

}  // namespace pyringar
