// convert: Python names to enums, and C++ exceptions to classes of pyringar.errors.
//
// Contract  An unknown name raises ArgumentError with the choices.
// Threads   with the GIL held.
// Tests     tests/conformance/test_refused.py, tests/test_communicator.py
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <string>

#include "bindings/tensor.h"
#include "core/collective.h"
#include "core/error.h"

namespace pyringar {

inline std::chrono::nanoseconds to_nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, 1e9) * 1e9));
}

template <typename Enum>
std::optional<Enum> find(py::handle given, const char* (*name_of)(Enum), int count) {
  const bool is_text = PyUnicode_Check(given.ptr()) != 0;
  for (int i = 0; is_text && i < count; ++i) {
    const char* name = name_of(static_cast<Enum>(i));
    if (PyUnicode_CompareWithASCIIString(given.ptr(), name) == 0) return static_cast<Enum>(i);
  }
  return std::nullopt;
}

template <typename Enum>
Enum parse(py::handle given, const char* argument, const char* (*name_of)(Enum), int count) {
  if (const std::optional<Enum> found = find(given, name_of, count)) return *found;
  std::string choices;
  for (int i = 0; i < count; ++i) {
    choices += join(i == 0 ? "" : ", ", name_of(static_cast<Enum>(i)));
  }
  const std::string value = py::repr(given);
  fail(ErrorKind::kArgument, argument, " is ", value, ", expected one of ", choices);
}

inline Order parse_order(py::handle order) {
  return parse<Order>(order, "order", &order_name, kNumOrders);
}

inline Reduction parse_reduction(py::handle op, py::handle order) {
  const Reduction reduction{parse<ReduceOp>(op, "op", &op_name, kNumReduceOps), parse_order(order)};
  if (!has_order(reduction.op, reduction.order)) {
    fail(ErrorKind::kArgument, "order is 'exact' and op '", op_name(reduction.op),
         "', expected 'sum' or 'mean' with it");
  }
  return reduction;
}

inline Algorithm parse_algorithm(py::handle algorithm) {
  return parse<Algorithm>(algorithm, "algorithm", &algorithm_name, kNumAlgorithms);
}

// Store in_flight[work] = memory and return the work, with no Python code in between: a signal
// handler that raises there would free the memory.
inline py::object keep_until_done(py::handle in_flight, py::object work, py::object memory) {
  if (PyDict_SetItem(in_flight.ptr(), work.ptr(), memory.ptr()) != 0) {
    memory.release();  // leak the memory: the engine still writes to it
    throw py::error_already_set();
  }
  return work;
}

inline py::object python_class(ErrorKind kind) {
  constexpr const char* kClasses[] = {"ArgumentError", "UnsupportedError", "CollectiveTimeout",
                                      "RingarError",   "CudaError",        "PeerLostError"};
  return py::module_::import("pyringar.errors").attr(kClasses[static_cast<int>(kind)]);
}

inline void set_python_error(std::exception_ptr pointer) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyErr_SetString(python_class(error.kind()).ptr(), error.what());
  } catch (const PythonErrorPending&) {
  } catch (const py::error_already_set& error) {
    // error.restore() may be called once, but the exception of a work can be raised repeatedly.
    PyErr_Restore(error.type().inc_ref().ptr(), error.value().inc_ref().ptr(),
                  error.trace().inc_ref().ptr());
  } catch (const std::bad_alloc& error) {
    PyErr_SetString(PyExc_MemoryError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(python_class(ErrorKind::kState).ptr(), error.what());
  }
}

// Exception translator for pybind11. It passes other exceptions on to the next translator.
inline void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error&) {
    set_python_error(pointer);
  } catch (const PythonErrorPending&) {
    set_python_error(pointer);
  }
}

}  // namespace pyringar
