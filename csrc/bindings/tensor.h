// tensor: reads Python tensors without torch's headers, and checks them.
//
// Units     shape and strides in elements, borrowed from the tensor.
// Contract  A TensorView is valid while its Python object lives and is not resized. An Error names
//           the operation, the argument with its index, and the value.
// Threads   with the GIL held.
// Tests     tests/conformance/test_refused.py, tests/conformance/test_layouts.py
#pragma once

#include <pybind11/pytypes.h>  // compiles five times as fast as pybind11.h

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "bindings/torch_functions.h"
#include "core/collective.h"
#include "cpu/strided.h"

namespace pyringar {

namespace py = pybind11;

struct TensorView {
  PyObject* object;
  std::byte* data;
  int device;  // GPU index, or kHost
  DType dtype;
  bool is_negated;  // torch's lazy negation: memory holds the negated elements
  bool is_dense;    // its elements fill one block of memory, in any order
  int ndim;
  const std::int64_t* shape;
  const std::int64_t* strides;
  std::size_t numel;

  std::size_t bytes() const { return numel * item_bytes(dtype); }
  void count() {
    numel = 1;
    for (int dim = 0; dim < ndim; ++dim) numel *= static_cast<std::size_t>(shape[dim]);
  }
  StridedView strided() const;
};

// Position of a tensor in the arguments: "tensor", "tensors[1]", "lists[1][0]".
struct ArgName {
  const char* argument;
  int index = -1;
  int inner = -1;
  std::string text() const;
};

// Describe an object's type for messages: "None", "an int", "a list".
std::string type_text(PyObject* object);

// Fill `view` in place: returning a TensorView would copy it, which costs as much as reading it.
void read_tensor(PyObject* object, const char* operation, ArgName name, TensorView* view);

std::string device_name(int device);

// Return torch's current stream of a GPU, as a CUDA runtime handle.
void* current_stream(int device);

// Fill `view`, except is_negated and is_dense. False: read_tensor() raises the reason.
bool try_view(PyObject* object, TensorView* view);

inline bool is_sequence(PyObject* object) { return PyList_Check(object) || PyTuple_Check(object); }

bool is_plain_tensor(PyObject* object);

// Return a tensor, or an array (CuPy, NumPy, ...) as a tensor that shares its memory. Other objects
// are returned unchanged, and read_tensor() refuses them.
py::object as_tensor(PyObject* object, const char* operation, const std::string& name);

// True if two tensors of one shape have equal signs and strides, except in dimensions of size 1.
bool same_layout(const TensorView& view, const TensorView& first);

// True if elements are contiguous in index order.
bool has_index_order(const TensorView& view);

// Identifies a tensor's memory and layout, to detect changes.
class TensorIdentity {
 public:
  explicit TensorIdentity(PyObject* tensor);
  bool matches(const TensorView& view) const;

 private:
  const std::byte* data_;
  int device_;
  DType dtype_;
  bool is_negated_;
  std::vector<std::int64_t> layout_;  // sizes, then strides
};

// Scope in which a thread reads tensors. torch may release the GIL meanwhile. After the
// interpreter's end a daemon thread must not reacquire the GIL (bindings/gil_release.h).
class TensorReadGuard {
 public:
  TensorReadGuard();  // once a thread has called end(), blocks all other threads forever
  ~TensorReadGuard() { --num_threads_; }
  TensorReadGuard(const TensorReadGuard&) = delete;
  TensorReadGuard& operator=(const TensorReadGuard&) = delete;

  // Called before the interpreter's end. Waits at most one second for threads that read tensors.
  static void end();

 private:
  inline static int num_threads_ = 0;  // the GIL guards both members
  inline static std::optional<std::thread::id> last_reader_;
};

// Names in messages for the tensors of one list, or of concatenated lists of equal length.
struct ListNames {
  const char* argument;
  bool is_indexed = true;
  std::size_t per_list = 0;  // tensors per list; 0: one list, or one tensor

  ArgName operator[](std::size_t i) const {
    const auto number = static_cast<int>(i);
    if (!is_indexed) return {argument};
    if (per_list == 0) return {argument, number};
    const auto length = static_cast<int>(per_list);
    return {argument, number / length, number % length};
  }
};

// Thrown by C++ code that does not hold the GIL, while a Python exception is pending.
struct PythonErrorPending {};

// Return the storages of all tensors in these lists, to keep their memory alive. Skip None.
py::list storages_of(std::initializer_list<py::handle> lists);

// Increment the autograd versions of tensors (a list or tuple) that are written in place.
inline void mark_written(PyObject* tensors) { TorchFunctions::get().increment_version(tensors); }

}  // namespace pyringar
