// gil_release: releases the GIL during calls, and runs signal handlers during waits.
//
// Contract  A GilRelease releases the GIL for its lifetime. A short call keeps the GIL until it
//           must wait: release_gil() then releases it. mark_tensors_written() runs after the call
//           is announced, while other ranks read the announcement. Signal handlers may use other
//           groups. The functions act on the thread's innermost GilRelease, if any.
// Threads   any; each thread has separate GilReleases.
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

// Acquire the GIL. After the interpreter's end Python makes daemon threads exit, which would abort
// the process inside noexcept C++ frames. A daemon thread sleeps here instead, as in Python 3.14.
inline void acquire_gil(PyThreadState* state) {
  try {
    PyEval_RestoreThread(state);
  } catch (...) {
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
}

class GilRelease {
 public:
  // kCheck: waits run signal handlers. kDefer: they do not, for destructors, which cannot throw.
  enum class Signals { kCheck, kDefer };

  explicit GilRelease(Signals signals = Signals::kCheck)
      : signals_(signals), outer_(innermost_), state_(PyEval_SaveThread()) {
    innermost_ = this;
  }
  // For a short call: keeps the GIL until release_gil(). unmarked: tensors that the call writes.
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

  // True in a signal handler that interrupted a wait of this thread.
  static bool is_interrupted() { return innermost_ != nullptr; }

 private:
  friend void check_signals();
  friend void release_gil();
  friend void mark_tensors_written();

  inline static thread_local GilRelease* innermost_ = nullptr;
  const Signals signals_;
  GilRelease* const outer_;
  bool holds_gil_ = false;  // true: a short call that has not released the GIL yet
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

// Called before a wait that takes longer than releasing the GIL.
inline void release_gil() {
  GilRelease* const call = GilRelease::innermost_;
  if (call == nullptr || !call->holds_gil_) return;
  mark_tensors_written();
  call->holds_gil_ = false;
  call->state_ = PyEval_SaveThread();
}

// Run signal handlers. Throw a handler's exception, or a kState Error in a forked child process.
inline void check_signals() {
  GilRelease* const call = GilRelease::innermost_;
  if (call == nullptr || call->signals_ == GilRelease::Signals::kDefer) return;
  if (call->state_ == nullptr) return;  // a signal handler of this thread runs already
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

// Make a Python function that owns `state`. Calling a pybind11 method would take 0.3 us longer.
template <typename State>
py::object function_over(PyMethodDef& method, std::unique_ptr<State> state) {
  const py::capsule capsule(state.release(), [](void* kept) { delete static_cast<State*>(kept); });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
}

template <typename State>
State& state_of(PyObject* capsule) {
  return *static_cast<State*>(PyCapsule_GetPointer(capsule, nullptr));
}

// Delete a group, which joins its background thread. is_background: this is that thread, so a new
// thread deletes the group.
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
    // No thread available, and this thread cannot join itself: leak the group.
  }
}

}  // namespace pyringar
