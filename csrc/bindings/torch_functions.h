// torch_functions: direct calls to torch C++ functions that read tensors and thread state.
//
// Floor     bindings. No torch header, no linking: functions are looked up by name in the loaded
//           libraries. The stable C shim (aoti_torch_*) returns errors. The other functions have
//           mangled names, which encode their parameter types.
// Contract  get() tests the functions on tensors with known answers. If one is missing or wrong,
//           Python answers all calls, ten times slower. No function releases the GIL or
//           throws: a torch exception must not cross an engine with a static libstdc++.
// Threads   with the GIL held.
// Tests     tests/test_torch_functions.py
#pragma once

#include <pybind11/pytypes.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "core/dtype.h"

namespace pyringar {

namespace py = pybind11;

struct TensorView;

class TorchFunctions {
 public:
  static const TorchFunctions& get();

  // For tests: choose between C++ and Python. Return True if C++ is used.
  static bool use(bool are_direct);
  bool is_grad_enabled() const;  // true: autograd records this thread's operations
  // true if a dispatch mode, such as make_fx, is active in this thread
  bool has_dispatch_modes() const;
  bool is_neg(PyObject* tensor) const;
  bool requires_grad(PyObject* tensor) const;
  // Fill `view`, except is_negated and is_dense. False: the object is no supported Tensor.
  bool read(PyObject* object, TensorView* view) const {
    return are_direct_ && read_direct(object, view);
  }
  void increment_version(PyObject* tensors) const;

 private:
  using Tensor = const void*;  // at::Tensor: one pointer, to a TensorImpl

  TorchFunctions();
  template <typename Value>
  using Getter = std::int32_t (*)(const Tensor*, Value*);  // returns 0 on success

  bool look_up();
  bool find_offset(const py::object& tensor);
  bool have_right_answers(const py::object& tensor) const;
  bool reads(const py::object& tensor) const;
  bool read_direct(PyObject* object, TensorView* view) const;

  const Tensor* tensor_in(PyObject* object) const {
    return reinterpret_cast<const Tensor*>(reinterpret_cast<const std::byte*>(object) + offset_);
  }

  static TorchFunctions* functions_;

  py::object torch_;
  py::object torch_c_;
  bool are_found_ = false;
  bool are_direct_ = false;
  PyTypeObject* tensor_type_ = nullptr;
  std::size_t offset_ = 0;  // byte offset of the at::Tensor inside a Python tensor object
  std::array<std::int32_t, kNumDTypes> dtype_codes_{};
  std::int32_t cpu_code_ = 0;
  std::int32_t cuda_code_ = 0;
  bool (*is_grad_enabled_)() = nullptr;
  std::int64_t (*num_dispatch_modes_)() = nullptr;
  bool (*is_neg_)(const Tensor*) = nullptr;
  bool (*is_inference_)(const Tensor*) = nullptr;
  void (*bump_version_)(const Tensor*) = nullptr;
  bool (*requires_grad_)(const void* impl) = nullptr;
  Getter<std::int32_t> dtype_ = nullptr;
  Getter<std::int32_t> device_type_ = nullptr;
  Getter<std::int32_t> device_index_ = nullptr;
  Getter<std::int64_t> dim_ = nullptr;
  Getter<const std::int64_t*> sizes_ = nullptr;
  Getter<const std::int64_t*> strides_ = nullptr;
  Getter<std::byte*> data_ = nullptr;
};

}  // namespace pyringar
