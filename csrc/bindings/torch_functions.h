// torch_functions: what a call asks torch about its tensors and its thread.
//
// Floor     bindings. Nothing is linked and no header of torch is included: C++ functions are
//           looked up in the loaded libraries by mangled names, which hold the parameter types.
// Contract  get() tries the functions on tensors with known answers. If one is missing or wrong,
//           all questions go through Python, which takes ten times as long.
//           A C++ function neither throws for a tensor of any kind nor releases the GIL.
// Threads   with the GIL held.
// Tests     tests/test_torch_functions.py
#pragma once

#include <pybind11/pytypes.h>

#include <cstddef>
#include <cstdint>

namespace pyringar {

namespace py = pybind11;

class TorchFunctions {
 public:
  static const TorchFunctions& get();

  // For tests: ask through Python, or again in C++. Returns whether C++ is asked.
  static bool use(bool are_direct);
  bool is_grad_enabled() const;     // whether autograd records what this thread does
  bool has_dispatch_modes() const;  // modes see this thread's calls, as make_fx does
  // tensor: a torch.Tensor, or of a subclass.
  bool is_neg(PyObject* tensor) const;
  bool requires_grad(PyObject* tensor) const;
  // tensors: a list or tuple.
  void increment_version(PyObject* tensors) const;

 private:
  using Tensor = const void*;  // at::Tensor: one pointer, to a TensorImpl

  TorchFunctions();
  bool look_up();
  bool find_offset(const py::object& tensor);
  bool have_right_answers(const py::object& tensor) const;

  const Tensor* tensor_in(PyObject* object) const {
    return reinterpret_cast<const Tensor*>(reinterpret_cast<const std::byte*>(object) + offset_);
  }

  static TorchFunctions* functions_;

  py::object torch_;
  py::object torch_c_;
  bool are_found_ = false;
  bool are_direct_ = false;
  std::size_t offset_ = 0;  // of the at::Tensor in a Python tensor
  bool (*is_grad_enabled_)() = nullptr;
  std::int64_t (*num_dispatch_modes_)() = nullptr;
  bool (*is_neg_)(const Tensor*) = nullptr;
  bool (*is_inference_)(const Tensor*) = nullptr;
  void (*bump_version_)(const Tensor*) = nullptr;
  bool (*requires_grad_)(const void* impl) = nullptr;
};

}  // namespace pyringar
