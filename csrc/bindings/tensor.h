// tensor: what a collective must know of a Python tensor, read without torch's headers and checked.
//
// Units     shape and strides in elements, as torch gives them; borrowed from the tensor.
// Contract  A TensorView is valid while its Python object lives and is not resized. Every refusal
//           is an Error that names the operation, the argument with its index, and the value.
// Threads   with the GIL held.
// Tests     tests/conformance/test_refused.py, tests/conformance/test_layouts.py
#pragma once

#include <pybind11/pytypes.h>  // a fifth of the whole pybind11's compile time

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
  int device;  // index of the GPU, or kHost
  DType dtype;
  bool is_negated;  // torch's lazy negation: memory holds the elements with the other sign
  bool is_dense;    // its elements fill one block of memory as they are, in whatever order
  int ndim;
  const std::int64_t* shape;
  const std::int64_t* strides;
  std::size_t numel;

  std::size_t bytes() const { return numel * item_bytes(dtype); }
  // Sets numel.
  void count() {
    numel = 1;
    for (int dim = 0; dim < ndim; ++dim) numel *= static_cast<std::size_t>(shape[dim]);
  }
  StridedView strided() const;
};

// Where a tensor stands in the caller's arguments: "tensor", "tensors[1]", "lists[1][0]".
struct ArgName {
  const char* argument;
  int index = -1;
  int inner = -1;
  std::string text() const;
};

// What an object is, for messages: "None", "an int", "a list".
std::string kind_of(PyObject* object);

// Into a view where it is to stay: copying one that was just written costs as much as reading it.
void read_tensor(PyObject* object, const char* operation, ArgName name, TensorView* view);

// "cpu" or "cuda:1".
std::string device_name(int device);

// torch's current stream on a GPU, as the CUDA runtime knows it.
void* current_stream(int device);

// Reads a tensor on a CPU or GPU with a dtype of the engine, but for is_negated and is_dense. False
// for other objects: the checks of a call say why.
bool try_view(PyObject* object, TensorView* view);

inline bool is_sequence(PyObject* object) { return PyList_Check(object) || PyTuple_Check(object); }

// torch.Tensor itself, not a subclass: what needs no second look.
bool is_plain_tensor(PyObject* object);

// A torch.Tensor as it is; an array of another library (CuPy, NumPy, ...) as a tensor that shares
// its memory; anything else as it is, for read_tensor() to refuse. Errors name operation and name.
py::object as_tensor(PyObject* object, const char* operation, const std::string& name);

// Whether tensors of one shape have equal layouts. Strides of dimensions of size 1 do not count,
// nor any strides of a tensor with one element or none.
bool lie_alike(const TensorView& view, const TensorView& first);

// Whether elements lie side by side in the order of their index.
bool has_index_order(const TensorView& view);

// Where a tensor's elements lie: tells at once whether a tensor still lies there.
class TensorIdentity {
 public:
  explicit TensorIdentity(PyObject* tensor);
  // view: from try_view().
  bool is_of(const TensorView& view) const;

 private:
  const std::byte* data_;
  int device_;
  DType dtype_;
  bool is_negated_;
  std::vector<std::int64_t> layout_;  // sizes, then strides
};

// A thread that reads tensors. torch gives the GIL away meanwhile, and a daemon thread that comes
// back for it after the interpreter's end would abort the process (bindings/gil_release.h).
class TensorReadGuard {
 public:
  TensorReadGuard();  // stays for ever in any other thread than the one that has called end()
  ~TensorReadGuard() { --num_threads_; }
  TensorReadGuard(const TensorReadGuard&) = delete;
  TensorReadGuard& operator=(const TensorReadGuard&) = delete;

  // Before the interpreter's end. Waits for those who read, but not longer than a second: a
  // tensor's own Python code may wait for anything.
  static void end();

 private:
  inline static int num_threads_ = 0;  // guarded by the GIL, as the next is
  inline static std::optional<std::thread::id> last_reader_;
};

// Names of the tensors of a list, or of equally long lists end to end.
struct ListNames {
  const char* argument;
  bool is_indexed = true;
  std::size_t per_list = 0;  // 0: it is one list, or one tensor

  ArgName operator[](std::size_t i) const {
    const auto number = static_cast<int>(i);
    if (!is_indexed) return {argument};
    if (per_list == 0) return {argument, number};
    const auto length = static_cast<int>(per_list);
    return {argument, number / length, number % length};
  }
};

// Thrown through code that has released the GIL, while a Python exception is pending.
struct PythonErrorPending {};

// The storages of the tensors in these lists (None: no list), which keep their memory.
py::list storages_of(std::initializer_list<py::handle> lists);

// Tells autograd that these tensors (a list or tuple) were written in place.
inline void mark_written(PyObject* tensors) { TorchFunctions::get().increment_version(tensors); }

}  // namespace pyringar
