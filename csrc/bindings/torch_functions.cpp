// torch_functions: looks up torch's C++ functions by name and tests them.
#include "bindings/torch_functions.h"

#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <algorithm>

#include "bindings/tensor.h"

namespace pyringar {

namespace {

#if defined(__APPLE__)
constexpr const char* kCore = "libc10.dylib";
constexpr const char* kCpu = "libtorch_cpu.dylib";
#else
constexpr const char* kCore = "libc10.so";
constexpr const char* kCpu = "libtorch_cpu.so";
#endif

template <typename Function>
bool look_up_in(const char* library, const char* name, Function* function) {
  void* const loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (loaded == nullptr) return false;
  *function = reinterpret_cast<Function>(dlsym(loaded, name));
  dlclose(loaded);  // torch keeps the library loaded after this call
  return *function != nullptr;
}

bool is_true(const py::handle& object) { return object.ptr() == Py_True; }

}  // namespace

TorchFunctions* TorchFunctions::functions_ = nullptr;

const TorchFunctions& TorchFunctions::get() {
  // The GIL guards `functions_`, not the lock of an initialized static: the constructor may release
  // the GIL to a thread that would wait for that lock. Of two objects the last is kept.
  if (functions_ == nullptr) functions_ = new TorchFunctions;
  return *functions_;
}

bool TorchFunctions::use(bool are_direct) {
  get();
  functions_->are_direct_ = are_direct && functions_->are_found_;
  return functions_->are_direct_;
}

TorchFunctions::TorchFunctions()
    : torch_(py::module_::import("torch")), torch_c_(py::module_::import("torch._C")) {
  if (!look_up()) return;
  tensor_type_ = reinterpret_cast<PyTypeObject*>(torch_.attr("Tensor").ptr());
  try {
    const py::object tensor = torch_.attr("Tensor")(py::make_tuple(1.0));
    are_direct_ = are_found_ = find_offset(tensor) && have_right_answers(tensor);
  } catch (py::error_already_set&) {
    // A dispatch mode of this thread rejected the test tensor: use Python instead.
  }
}

bool TorchFunctions::look_up() {
  // Functions that return torch's dtype codes, in the order of DType.
  constexpr std::array<const char*, kNumDTypes> kCodes = {
      "aoti_torch_dtype_float64",  "aoti_torch_dtype_float32", "aoti_torch_dtype_float16",
      "aoti_torch_dtype_bfloat16", "aoti_torch_dtype_int8",    "aoti_torch_dtype_uint8",
      "aoti_torch_dtype_int32",    "aoti_torch_dtype_int64"};
  const auto has_code = [](const char* name, std::int32_t* code) {
    std::int32_t (*function)() = nullptr;
    if (!look_up_in(kCpu, name, &function)) return false;
    *code = function();
    return true;
  };
  for (std::size_t i = 0; i < kCodes.size(); ++i) {
    if (!has_code(kCodes[i], &dtype_codes_[i])) return false;
  }
  return has_code("aoti_torch_device_type_cpu", &cpu_code_) &&
         has_code("aoti_torch_device_type_cuda", &cuda_code_) &&
         look_up_in(kCpu, "aoti_torch_grad_mode_is_enabled", &is_grad_enabled_) &&
         look_up_in(kCpu, "aoti_torch_get_dtype", &dtype_) &&
         look_up_in(kCpu, "aoti_torch_get_device_type", &device_type_) &&
         look_up_in(kCpu, "aoti_torch_get_device_index", &device_index_) &&
         look_up_in(kCpu, "aoti_torch_get_dim", &dim_) &&
         look_up_in(kCpu, "aoti_torch_get_sizes", &sizes_) &&
         look_up_in(kCpu, "aoti_torch_get_strides", &strides_) &&
         look_up_in(kCpu, "aoti_torch_get_data_ptr", &data_) &&
         look_up_in(kCore, "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv",
                    &num_dispatch_modes_) &&
         look_up_in(kCore, "_ZNK3c1010TensorImpl13requires_gradEv", &requires_grad_) &&
         look_up_in(kCpu, "_ZN2at6native6is_negERKNS_6TensorE", &is_neg_) &&
         look_up_in(kCpu, "_ZN2at6native12is_inferenceERKNS_6TensorE", &is_inference_) &&
         look_up_in(kCpu, "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE", &bump_version_);
}

bool TorchFunctions::find_offset(const py::object& tensor) {
  const auto impl = reinterpret_cast<const void*>(py::cast<std::uintptr_t>(tensor.attr("_cdata")));
  const auto size = py::cast<std::size_t>(torch_.attr("Tensor").attr("__basicsize__"));
  for (offset_ = sizeof(PyObject); offset_ + sizeof(Tensor) <= size; offset_ += sizeof(Tensor)) {
    if (*tensor_in(tensor.ptr()) == impl) return true;
  }
  return false;
}

// Check read_direct() on a strided view: columns 1 to 3, transposed, of a 2 x 5 tensor.
bool TorchFunctions::reads(const py::object& tensor) const {
  const py::object rows = tensor.attr("new_zeros")(py::make_tuple(2, 5));
  const py::object part = rows.attr("t")()[py::slice(1, 4, 1)];
  const auto data = py::cast<std::uintptr_t>(part.attr("data_ptr")());
  const auto item = py::cast<std::size_t>(part.attr("element_size")());
  TensorView view;
  return read_direct(part.ptr(), &view) && reinterpret_cast<std::uintptr_t>(view.data) == data &&
         view.device == kHost && is_float(view.dtype) && item_bytes(view.dtype) == item &&
         view.ndim == 2 && view.shape[0] == 3 && view.shape[1] == 2 && view.strides[0] == 1 &&
         view.strides[1] == 5 && view.numel == 6;
}

bool TorchFunctions::have_right_answers(const py::object& tensor) const {
  PyObject* const plain = tensor.ptr();
  const py::object negated = torch_.attr("_neg_view")(tensor);
  const py::object trained = tensor.attr("clone")().attr("requires_grad_")();
  const auto version = [&] { return py::cast<int>(tensor.attr("_version")); };
  if (!reads(tensor)) return false;
  const bool is_inference = is_inference_(tensor_in(plain));
  if (is_inference != is_true(tensor.attr("is_inference")())) return false;
  if (!is_inference) {
    const int before = version();
    bump_version_(tensor_in(plain));
    if (version() != before + 1) return false;
  }
  const py::object has_grad = torch_.attr("is_grad_enabled");
  const py::object set_grad = torch_c_.attr("_set_grad_enabled");
  const bool is_enabled = is_true(has_grad());
  const bool is_seen = is_grad_enabled_() == is_enabled;
  set_grad(!is_enabled);
  const bool is_change_seen = is_grad_enabled_() != is_enabled;
  set_grad(is_enabled);
  const auto num_modes = py::cast<std::int64_t>(torch_c_.attr("_len_torch_dispatch_stack")());
  return is_seen && is_change_seen && num_dispatch_modes_() == num_modes &&
         !is_neg_(tensor_in(plain)) && is_neg_(tensor_in(negated.ptr())) &&
         !requires_grad_(*tensor_in(plain)) && requires_grad_(*tensor_in(trained.ptr()));
}

bool TorchFunctions::is_grad_enabled() const {
  return are_direct_ ? is_grad_enabled_() : is_true(torch_.attr("is_grad_enabled")());
}

bool TorchFunctions::has_dispatch_modes() const {
  if (are_direct_) return num_dispatch_modes_() != 0;
  return py::cast<int>(torch_c_.attr("_len_torch_dispatch_stack")()) != 0;
}

bool TorchFunctions::is_neg(PyObject* tensor) const {
  return are_direct_ ? is_neg_(tensor_in(tensor)) : is_true(py::handle(tensor).attr("is_neg")());
}

bool TorchFunctions::requires_grad(PyObject* tensor) const {
  return are_direct_ ? requires_grad_(*tensor_in(tensor))
                     : is_true(py::handle(tensor).attr("requires_grad"));
}

bool TorchFunctions::read_direct(PyObject* object, TensorView* view) const {
  if (Py_TYPE(object) != tensor_type_) return false;
  const Tensor* const tensor = tensor_in(object);
  std::int32_t type = 0;
  std::int32_t device = 0;
  std::int64_t dim = 0;
  if (device_type_(tensor, &device) != 0 || dtype_(tensor, &type) != 0) return false;
  view->device = kHost;
  if (device == cuda_code_) {
    if (device_index_(tensor, &view->device) != 0) return false;
  } else if (device != cpu_code_) {
    return false;
  }
  const auto* const code = std::find(dtype_codes_.begin(), dtype_codes_.end(), type);
  if (code == dtype_codes_.end()) return false;
  view->dtype = static_cast<DType>(code - dtype_codes_.begin());
  if (dim_(tensor, &dim) != 0 || sizes_(tensor, &view->shape) != 0 ||
      strides_(tensor, &view->strides) != 0 || data_(tensor, &view->data) != 0) {
    return false;
  }
  view->object = object;
  view->ndim = static_cast<int>(dim);
  view->count();
  return true;
}

void TorchFunctions::increment_version(PyObject* tensors) const {
  if (!are_direct_) {
    const py::object increment = torch_.attr("autograd").attr("graph").attr("increment_version");
    Py_XDECREF(PyObject_CallOneArg(increment.ptr(), tensors));
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return;
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(tensors); ++i) {
    const Tensor* const tensor = tensor_in(PySequence_Fast_GET_ITEM(tensors, i));
    if (!is_inference_(tensor)) bump_version_(tensor);  // inference tensors have no version
  }
}

}  // namespace pyringar
