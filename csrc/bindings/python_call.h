// python_call: releases the GIL, and handles signals during waits.
//
// Contract  While a PythonCall lives the GIL is released: at once, or in a short call when
//           let_others_run() says that it must wait. A short call marks its tensors as written in
//           mark_announced(), while other ranks look at its announcement. look_at_signals() takes
//           the GIL back for a moment; handlers may use other groups. All three are for the
//           innermost PythonCall of the thread, if any.
// Threads   each for itself.
// Tests     tests/test_signals.py
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "bindings/tensor.h"
#include "core/error.h"
#include "os/process.h"

namespace pyringar {

// After the interpreter's end Python tells a daemon thread to exit, which would abort the process
// in frames of C++ that let nothing pass. It stays here instead, as Python 3.14 lets it.
inline void take_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

class PythonCall {
 public:
  // kWait: for destructors, which cannot throw.
  enum class Signals { kLookAt, kWait };

  explicit PythonCall(Signals signals = Signals::kLookAt)
      : signals_(signals), outer_(innermost_), state_(PyEval_SaveThread()) {
    innermost_ = this;
  }
  // A short one. unmarked: the list or tuple of the tensors that it writes.
  explicit PythonCall(PyObject* unmarked)
      : signals_(Signals::kLookAt), outer_(innermost_), holds_gil_(true), unmarked_(unmarked) {
    innermost_ = this;
  }
  ~PythonCall() {
    innermost_ = outer_;
    if (!holds_gil_) take_gil(state_);
  }
  PythonCall(const PythonCall&) = delete;
  PythonCall& operator=(const PythonCall&) = delete;

  // Whether a signal handler runs now that interrupted a wait.
  static bool is_interrupted() { return innermost_ != nullptr; }

 private:
  friend void look_at_signals();
  friend void let_others_run();
  friend void mark_announced();

  inline static thread_local PythonCall* innermost_ = nullptr;
  const Signals signals_;
  PythonCall* const outer_;
  bool holds_gil_ = false;  // still
  PyObject* unmarked_ = nullptr;
  PyThreadState* state_ = nullptr;
};

inline void mark_announced() {
  PythonCall* const call = PythonCall::innermost_;
  if (call == nullptr || call->unmarked_ == nullptr) return;
  try {
    mark_written(std::exchange(call->unmarked_, nullptr));
  } catch (const py::error_already_set&) {
    fail(ErrorKind::kState, "torch could not count a change of the tensor: no memory?");
  }
}

// Before a wait for longer than the release of the GIL takes.
inline void let_others_run() {
  PythonCall* const call = PythonCall::innermost_;
  if (call == nullptr || !call->holds_gil_) return;
  mark_announced();
  call->holds_gil_ = false;
  call->state_ = PyEval_SaveThread();
}

// Throws the exception of a signal's handler; kState in a child that a handler has forked.
inline void look_at_signals() {
  PythonCall* const call = PythonCall::innermost_;
  if (call == nullptr || call->signals_ == PythonCall::Signals::kWait) return;
  if (call->state_ == nullptr) return;  // it looks already
  const ForkGuard process;
  take_gil(std::exchange(call->state_, nullptr));
  const bool has_raised = PyErr_CheckSignals() != 0;
  call->state_ = PyEval_SaveThread();
  if (has_raised) throw PythonErrorPending{};
  if (process.forked()) {
    fail(ErrorKind::kState,
         "a signal handler has called fork() while this call waited; the call is the parent "
         "process's, and has ended in the child");
  }
}

// A plain C function for Python, which owns the state; a method would take 0.3 us longer.
template <typename State>
py::object function_over(PyMethodDef& method, std::unique_ptr<State> state) {
  const py::capsule capsule(state.release(), [](void* kept) { delete static_cast<State*>(kept); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
}

template <typename State>
State& state_of(PyObject* capsule) {
  return *static_cast<State*>(PyCapsule_GetPointer(capsule, nullptr));
}

// Its end waits for its background thread. That thread itself leaves it to another.
template <typename AnyGroup>
void delete_group(AnyGroup* group, bool is_background) {
  if (!is_background) {
    const PythonCall python_call(PythonCall::Signals::kWait);
    delete group;
    return;
  }
  try {
    std::thread([group] { delete group; }).detach();
  } catch (const std::system_error&) {
    // Left in memory: the system has no thread, and this one cannot wait for itself.
  }
}

}  // namespace pyringar
