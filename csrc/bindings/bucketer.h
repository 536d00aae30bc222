// bucketer: the gradient bucketer as Python sees it, and the hooks that parameters call.
//
// Floor     bindings; included by module.cpp alone, which has read the whole of pybind11 already.
// Contract  a hook is a plain C function that counts one gradient; Python is called once for each
//           backward pass, once for each complete bucket, and when something is wrong.
// Threads   with the GIL held.
// Tests     tests/test_bucketing.py
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings/convert.h"
#include "bucket/bucketer.h"

namespace pyringar {

// What Python is told. Callables take: on_pass(pass), on_complete(bucket), on_trouble(what, rank,
// param, pass); what they raise comes out of backward().
struct Callbacks {
  py::object on_pass;
  py::object on_complete;
  py::object on_trouble;
};

struct BoundBucketer {
  Bucketer core;
  Callbacks callbacks;
  bool is_counting = true;
};
using BucketerPtr = std::shared_ptr<BoundBucketer>;

// The number of the backward pass that calls this hook; torch counts from 0.
inline std::int64_t current_pass() {
  // Guarded by the GIL alone, as TorchNames in tensor.cpp.
  static PyObject* current_task = nullptr;
  if (current_task == nullptr) {
    const py::object found = py::module_::import("torch._C").attr("_current_graph_task_id");
    current_task = found.inc_ref().ptr();
  }
  const auto id = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(current_task));
  const long long number = id ? PyLong_AsLongLong(id.ptr()) : -1;
  if (PyErr_Occurred() != nullptr) throw_python_error();
  return number + 1;
}

inline void count(BoundBucketer& bucketer, int rank, int param) {
  if (!bucketer.is_counting) return;
  const std::int64_t pass = current_pass();
  if (bucketer.core.is_broken(pass)) return;
  if (bucketer.core.begin_pass(pass)) bucketer.callbacks.on_pass(pass);
  Mark mark = bucketer.core.mark(rank, param, pass);
  if (mark == Mark::kStillRuns || mark == Mark::kAfterLaunch) {
    // Raises, or has started over: then this gradient is the first of a new step. What this pass
    // had marked before is found by wait(); what it has sent would be reduced twice.
    const char* what = mark == Mark::kStillRuns           ? "still runs"
                       : bucketer.core.has_launched(pass) ? "launched by this pass"
                                                          : "launched";
    bucketer.callbacks.on_trouble(what, rank, param, pass);
    mark = bucketer.core.mark(rank, param, pass);
  }
  if (mark == Mark::kComplete) bucketer.callbacks.on_complete(bucketer.core.bucket_of(param));
}

struct Hook {
  BucketerPtr bucketer;
  int rank;
  int param;
};

inline constexpr const char* kHookCapsule = "pyringar.hook";

inline PyObject* call_hook(PyObject* capsule, PyObject*) {
  try {
    const auto* hook = static_cast<const Hook*>(PyCapsule_GetPointer(capsule, kHookCapsule));
    count(*hook->bucketer, hook->rank, hook->param);
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
  const py::capsule capsule(new Hook{bucketer, rank, param}, kHookCapsule, [](PyObject* c) {
    delete static_cast<Hook*>(PyCapsule_GetPointer(c, kHookCapsule));
  });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
}

inline BucketerPtr make_bucketer(int world_size,
                                 const std::vector<std::pair<std::size_t, int>>& items,
                                 std::size_t first_cap_bytes, std::size_t cap_bytes,
                                 py::object on_pass, py::object on_complete,
                                 py::object on_trouble) {
  std::vector<BucketItem> parsed;
  for (const auto& [bytes, kind] : items) parsed.push_back({bytes, kind});
  return BucketerPtr(
      new BoundBucketer{Bucketer(world_size, std::move(parsed), first_cap_bytes, cap_bytes),
                        {std::move(on_pass), std::move(on_complete), std::move(on_trouble)}});
}

inline void bind_bucketer(py::module_& m) {
  py::class_<BoundBucketer, BucketerPtr>(m, "Bucketer")
      .def(py::init(&make_bucketer), py::arg("world_size"), py::arg("items"),
           py::arg("first_cap_bytes"), py::arg("cap_bytes"), py::arg("on_pass"),
           py::arg("on_complete"), py::arg("on_trouble"))
      .def("hook", &make_hook, py::arg("rank"), py::arg("param"))
      .def_readwrite("is_counting", &BoundBucketer::is_counting)
      .def("buckets", [](BoundBucketer& b) { return b.core.buckets(); })
      .def("bytes_of", [](BoundBucketer& b, int bucket) { return b.core.bytes_of(bucket); })
      .def("launched", [](BoundBucketer& b, int bucket) { b.core.launched(bucket); })
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
      .def("end_pass", [](BoundBucketer& b, std::int64_t pass) { return b.core.end_pass(pass); })
      .def("break_off", [](BoundBucketer& b, std::int64_t pass) { return b.core.break_off(pass); })
      .def("has_unfinished_pass", [](BoundBucketer& b) { return b.core.has_unfinished_pass(); })
      .def("ready_order", [](BoundBucketer& b) { return b.core.ready_order(); })
      .def("plan", [](BoundBucketer& b, const std::vector<int>& order) { b.core.plan(order); })
      .def("reset", [](BoundBucketer& b) { b.core.reset(); });
  m.def("plan_buckets",
        [](const std::vector<std::pair<std::size_t, int>>& items, const std::vector<int>& order,
           std::size_t first_cap_bytes, std::size_t cap_bytes) {
          std::vector<BucketItem> parsed;
          for (const auto& [bytes, kind] : items) parsed.push_back({bytes, kind});
          return plan_buckets(parsed, order, first_cap_bytes, cap_bytes);
        });
}

}  // namespace pyringar
