// bucketer: the Python class `Bucketer`, and its gradient hooks.
//
// Floor     bindings; included by module.cpp alone, after pybind11.
// Contract  After accumulation a hook counts the gradient and launches a complete bucket. Before
//           accumulation a hook zeroes a gradient that holds an earlier sum (bucket/step.h).
// Threads   with the GIL held.
// Tests     tests/test_bucketing.py, tests/test_bucketing_sums.py
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <set>

#include "bindings/convert.h"
#include "bindings/gil_release.h"
#include "bucket/step.h"

namespace pyringar {

struct BoundBucketer {
  Step step;
  const std::size_t first_rank;      // global rank of this process's first rank, for messages
  const bool in_order;               // launch buckets in the order of the plan
  const py::object on_complete;      // weak method (bucket) that launches; None: wait() launches
  const py::object on_failed;        // weak method (reason): called when a backward pass fails
  const py::object on_new;           // (parameter): called when its .grad is a new tensor
  const py::object is_accumulating;  // (parameter) -> bool: does this pass accumulate into .grad?
  const py::object current_task = py::module_::import("torch._C").attr("_current_graph_task_id");
  const py::object engine =
      py::module_::import("torch.autograd").attr("Variable").attr("_execution_engine");
  py::object ready = py::none();  // cuda::ReadyEvents of this step; None without GPUs
  const ReadyHook* ready_hook = nullptr;
  std::set<std::int64_t> passes = {};  // ids of running backward passes
  bool is_launching = false;
  bool is_counting = true;
  bool is_closed = false;  // true: gradient hooks do nothing
};
using BucketerPtr = std::shared_ptr<BoundBucketer>;

inline void start_step(BoundBucketer& bucketer, const std::vector<Bucket>& plan,
                       const std::vector<std::size_t>& reduced, const py::object& ready) {
  bucketer.step.start(plan, reduced);
  if (ready.is_none()) return;
  bucketer.ready = ready;
  const py::capsule hook = ready.attr("hook")();
  bucketer.ready_hook = hook.get_pointer<const ReadyHook>();
  bucketer.ready_hook->start_step(bucketer.ready_hook->self);
}

template <typename Argument>
void call_if_alive(const py::object& weak_method, const Argument& argument) {
  const py::object method = weak_method();
  if (!method.is_none()) method(argument);
}

// -- backward passes ------------------------------------------------------------------------------

// Detects a failed backward pass. torch runs the callback that holds this object only after
// success, but always destroys the callback.
struct PassEnd {
  BucketerPtr bucketer;
  std::int64_t pass;

  ~PassEnd() {
    if (bucketer->passes.erase(pass) == 0) return;  // the callback ran: the pass succeeded
    const py::error_scope error_of_backward;
    for (int attempt = 0; attempt < 2; ++attempt) {  // a signal may interrupt the first attempt
      try {
        call_if_alive(bucketer->on_failed, "a backward pass failed");
        return;
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("the end of a backward pass that failed");
      }
    }
  }
};

// Compiled autograd does not run the callbacks that begin_pass() queues.
inline bool in_compiled_autograd() {
  const py::dict modules = py::module_::import("sys").attr("modules");
  const py::str name = "torch._dynamo.compiled_autograd";
  return modules.contains(name) && modules[name].attr("in_compiled_autograd_region").cast<bool>();
}

// Register the running backward pass. Return False if its end cannot be observed.
inline bool begin_pass(const BucketerPtr& bucketer) {
  const auto pass = bucketer->current_task().cast<std::int64_t>();
  if (bucketer->passes.count(pass) > 0) return true;
  if (in_compiled_autograd()) return false;
  const std::shared_ptr<PassEnd> end(new PassEnd{bucketer, pass});
  const py::cpp_function succeed([end] { end->bucketer->passes.erase(end->pass); });
  bucketer->engine.attr("queue_callback")(succeed);
  bucketer->passes.insert(pass);
  return true;
}

// -- hooks ----------------------------------------------------------------------------------------

struct Hook {
  BucketerPtr bucketer;
  std::size_t rank;
  std::size_t index;
  void (*function)(Hook&, py::handle);
  py::object ref;  // zero_sum: the parameter. count: weak reference to the last gradient, or None
};

// Zero the reduced gradient of an earlier step before autograd adds to it. Otherwise the next
// reduction would count that sum once per rank.
inline void zero_sum(Hook& hook, py::handle) {
  GradState& state = hook.bucketer->step.at(hook.rank, hook.index);
  if (state != GradState::kStaleSum) return;
  const py::object grad = hook.ref.attr("grad");
  if (grad.is_none() || !hook.bucketer->is_accumulating(hook.ref).cast<bool>()) return;
  state = GradState::kUncounted;
  grad.attr("detach")().attr("zero_")();
}

inline void launch_complete(BoundBucketer& bucketer, std::size_t bucket) {
  if (!bucketer.in_order) return call_if_alive(bucketer.on_complete, bucket);
  if (bucketer.is_launching) return;  // the thread that is launching launches this bucket too
  bucketer.is_launching = true;
  while (!bucketer.is_closed && bucketer.step.is_next_complete()) {
    call_if_alive(bucketer.on_complete, bucketer.step.next++);
  }
  bucketer.is_launching = false;
}

inline py::object weak_grad(py::handle param) {
  const py::object grad = param.attr("grad");
  return grad.is_none() ? grad : py::weakref(grad);
}

inline void count(Hook& hook, py::handle param) {
  // torch also calls this hook when backward produced no gradient. If other hooks exist, one of
  // them may have removed the gradient, which is an error.
  if (param.attr("grad").is_none() && py::len(param.attr("_post_accumulate_grad_hooks")) == 1) {
    return;
  }
  BoundBucketer& bucketer = *hook.bucketer;
  Step& step = bucketer.step;
  const std::size_t bucket = step.bucket_of[hook.index];
  const bool may_launch =
      bucketer.is_counting && !bucketer.on_complete.is_none() && begin_pass(hook.bucketer);
  if (step.launched_ns[bucket] != 0) {
    fail(ErrorKind::kState, "parameter ", hook.index, " of rank ", bucketer.first_rank + hook.rank,
         " got a gradient after its bucket was launched: put all backward passes of a step but the "
         "last into no_sync(), call wait() before the next step begins, or make the bucketer with "
         "overlap=False");
  }
  if (hook.ref.is_none() || !hook.ref().is(param.attr("grad"))) {
    bucketer.on_new(param);
    hook.ref = weak_grad(param);
  }
  GradState& state = step.at(hook.rank, hook.index);
  if (state != GradState::kCounted) state = GradState::kUncounted;
  if (!bucketer.is_counting) return;
  const bool is_new = step.count(hook.rank, hook.index);
  if (const ReadyHook* ready = bucketer.ready_hook) {
    const int rank = static_cast<int>(hook.rank);
    if (!ready->note(ready->self, static_cast<int>(bucket), rank, is_new))
      throw py::error_already_set();
  }
  if (is_new && may_launch && step.missing[bucket] == 0) launch_complete(bucketer, bucket);
}

inline PyObject* call_hook(PyObject* capsule, PyObject* tensor) {
  try {
    auto& hook = state_of<Hook>(capsule);
    if (!hook.bucketer->is_closed) hook.function(hook, tensor);
    Py_RETURN_NONE;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (...) {
    set_python_error(std::current_exception());
  }
  return nullptr;
}

inline py::object make_hook(const BucketerPtr& bucketer, std::size_t rank, std::size_t index,
                            const py::object& param, bool is_before) {
  static PyMethodDef method = {"gradient_hook", &call_hook, METH_O, nullptr};
  auto* hook = is_before ? new Hook{bucketer, rank, index, &zero_sum, param}
                         : new Hook{bucketer, rank, index, &count, weak_grad(param)};
  return function_over(method, std::unique_ptr<Hook>(hook));
}

// -- the Python class -----------------------------------------------------------------------------

inline void bind_bucketer(py::module_& m) {
  using Self = BoundBucketer&;
  using Index = std::size_t;
  const auto make = [](Index world_size, Index num_params, Index first_rank, Index first_summed,
                       bool in_order, const py::object& on_complete, const py::object& on_failed,
                       const py::object& on_new, const py::object& is_accumulating) {
    const Step step{world_size, num_params, first_summed};
    return BucketerPtr(new BoundBucketer{step, first_rank, in_order, on_complete, on_failed, on_new,
                                         is_accumulating});
  };
  py::class_<BoundBucketer, BucketerPtr>(m, "Bucketer")
      .def(py::init(make), py::arg("world_size"), py::arg("num_params"), py::arg("first_rank"),
           py::arg("first_summed"), py::arg("in_order"), py::arg("on_complete"),
           py::arg("on_failed"), py::arg("on_new"), py::arg("is_accumulating"))
      .def("make_hook", &make_hook)
      .def("start_step", &start_step)
      .def_readwrite("is_counting", &BoundBucketer::is_counting)
      .def_readwrite("is_closed", &BoundBucketer::is_closed)
      .def("is_running", [](Self b) { return !b.passes.empty(); })
      .def("held",
           [](Self b, Index rank, const Bucket& params) {
             std::vector<int> found;
             for (const Index i : params) found.push_back(static_cast<int>(b.step.at(rank, i)));
             return found;
           })
      .def("set_launched", [](Self b, Index i) { b.step.launched_ns.at(i) = Step::now_ns(); })
      .def("begin_ns", [](Self b) { return b.step.begin_ns; })
      .def("ready_ns", [](Self b) { return b.step.ready_ns; })
      .def("launched_ns", [](Self b) { return b.step.launched_ns; })
      .def("order", [](Self b) { return b.step.order; });
  m.def("plan_buckets", &plan_buckets, py::arg("items"), py::arg("order"),
        py::arg("first_cap_bytes"), py::arg("cap_bytes"));
}

}  // namespace pyringar
