// python_call: releases the GIL, and handles signals during waits.
//
// Contract  While a GilRelease lives the GIL is released: at once, or in a short call when
//           release_gil() says that it must wait. A short call marks its tensors as written in
//           mark_tensors_written(), while other ranks look at its announcement. check_signals()
//           takes the GIL back for a moment; handlers may use other groups. All three are for the
//           innermost GilRelease of the thread, if any.
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
inline void acquire_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

class GilRelease {
 public:
  // kDefer: for destructors, which cannot throw.
  enum class Signals { kCheck, kDefer };

  explicit GilRelease(Signals signals = Signals::kCheck)
      : signals_(signals), outer_(innermost_), state_(PyEval_SaveThread()) {
    innermost_ = this;
  }
  // A short one. unmarked: the list or tuple of the tensors that it writes.
  explicit GilRelease(PyObject* unmarked)
      : signals_(Signals::kCheck), outer_(innermost_), holds_gil_(true), unmarked_(unmarked) {
    innermost_ = this;
  }
  ~GilRelease() {
    innermost_ = outer_;
    if (!holds_gil_) acquire_gil(state_);
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

  // Whether a signal handler runs now that interrupted a wait.
  static bool is_interrupted() { return innermost_ != nullptr; }

 private:
  friend void check_signals();
  friend void release_gil();
  friend void mark_tensors_written();

  inline static thread_local GilRelease* innermost_ = nullptr;
  const Signals signals_;
  GilRelease* const outer_;
  bool holds_gil_ = false;  // still
  PyObject* unmarked_ = nullptr;
  PyThreadState* state_ = nullptr;
};

inline void mark_tensors_written() {
  GilRelease* const call = GilRelease::innermost_;
  if (call == nullptr || call->unmarked_ == nullptr) return;
  try {
    mark_written(std::exchange(call->unmarked_, nullptr));
  } catch (const py::error_already_set&) {
    fail(ErrorKind::kState, "torch could not count a change of the tensor: no memory?");
  }
}

// Before a wait for longer than the release of the GIL takes.
inline void release_gil() {
  GilRelease* const call = GilRelease::innermost_;
  if (call == nullptr || !call->holds_gil_) return;
  mark_tensors_written();
  call->holds_gil_ = false;
  call->state_ = PyEval_SaveThread();
}

// Throws the exception of a signal's handler; kState in a child that a handler has forked.
inline void check_signals() {
  GilRelease* const call = GilRelease::innermost_;
  if (call == nullptr || call->signals_ == GilRelease::Signals::kDefer) return;
  if (call->state_ == nullptr) return;  // it looks already
  const ForkGuard process;
  acquire_gil(std::exchange(call->state_, nullptr));
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
    const GilRelease no_gil(GilRelease::Signals::kDefer);
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
