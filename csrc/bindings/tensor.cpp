// tensor: reads data through DLPack's exchange table, and all else through torch's attributes.
#include "bindings/tensor.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <ranges>
#include <string_view>

#include "core/error.h"

namespace pyringar {

namespace {

// C structures of DLPack 1.3, and the table __dlpack_c_exchange_api__ of a tensor type (torch 2.11
// and up). A result of dltensor_from_py_object is valid until the tensor is resized or freed.
namespace dlpack {

constexpr std::uint32_t kMajorVersion = 1;
constexpr const char* kCapsuleName = "dlpack_exchange_api";
constexpr std::int32_t kCpu = 1;
constexpr std::int32_t kCuda = 2;

enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4 };

struct Tensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t ndim;
  std::uint8_t type_code;
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  const std::int64_t* shape;
  const std::int64_t* strides;
  std::uint64_t byte_offset;
};

struct ExchangeApi {
  std::uint32_t major_version;
  std::uint32_t minor_version;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*dltensor_from_py_object)(void* object, Tensor* out);
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

}  // namespace dlpack

std::string text_of(PyObject* object, const char* name) {
  return py::str(py::handle(object).attr(name));
}

// Python objects that every call needs, looked up once and leaked.
struct TorchNames {
  py::object tensor_type = py::module_::import("torch").attr("Tensor");
  py::object untyped_storage =
      py::reinterpret_steal<py::object>(PyUnicode_InternFromString("untyped_storage"));

  static TorchNames& get() {
    // The GIL guards `names`, not the lock of an initialized static: a lookup may release the GIL
    // to a thread that would wait for that lock. If two threads look up, the last result is kept.
    static TorchNames* names = nullptr;
    if (names == nullptr) names = new TorchNames;
    return *names;
  }
};

const dlpack::ExchangeApi* exchange_api_of(PyTypeObject* type) {
  static PyTypeObject* known_type = nullptr;  // guarded by the GIL
  static const dlpack::ExchangeApi* known_api = nullptr;
  if (type == known_type) return known_api;
  auto* as_object = reinterpret_cast<PyObject*>(type);
  const int is_tensor = PyObject_IsSubclass(as_object, TorchNames::get().tensor_type.ptr());
  if (is_tensor < 0) throw py::error_already_set();
  if (is_tensor == 0) return nullptr;
  const py::object capsule = py::handle(as_object).attr("__dlpack_c_exchange_api__");
  const auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (api == nullptr) throw py::error_already_set();
  while (api != nullptr && api->major_version != dlpack::kMajorVersion) api = api->previous;
  if (api == nullptr || api->dltensor_from_py_object == nullptr) {
    fail(ErrorKind::kUnsupported, "this torch offers no DLPack 1.x exchange table");
  }
  Py_INCREF(as_object);  // keep the type alive: a new type could get its address
  Py_XDECREF(known_type);
  known_type = type;
  known_api = api;
  return api;
}

bool has_known_device(const dlpack::Tensor& tensor) {
  return tensor.device_type == dlpack::kCpu || tensor.device_type == dlpack::kCuda;
}

bool read_dtype(const dlpack::Tensor& tensor, DType* dtype) {
  struct Code {
    dlpack::TypeCode code;
    int bits;
  };
  constexpr Code kCodes[kNumDTypes] = {
      {dlpack::kFloat, 64}, {dlpack::kFloat, 32}, {dlpack::kFloat, 16}, {dlpack::kBFloat, 16},
      {dlpack::kInt, 8},    {dlpack::kUInt, 8},   {dlpack::kInt, 32},   {dlpack::kInt, 64}};
  for (int i = 0; i < kNumDTypes; ++i) {
    if (tensor.type_code != kCodes[i].code || tensor.type_bits != kCodes[i].bits) continue;
    *dtype = static_cast<DType>(i);
    return tensor.type_lanes == 1;
  }
  return false;
}

void fill_view(PyObject* object, const dlpack::Tensor& raw, TensorView* view) {
  view->object = object;
  view->data = static_cast<std::byte*>(raw.data) + raw.byte_offset;
  view->device = raw.device_type == dlpack::kCuda ? raw.device_id : kHost;
  view->ndim = raw.ndim;
  view->shape = raw.shape;
  view->strides = raw.strides;
  view->count();
}

// dims: indices of the dimensions, innermost first.
template <typename Dims>
bool has_no_gaps(const TensorView& view, const Dims& dims) {
  std::int64_t expected = 1;
  for (const int dim : dims) {
    if (view.shape[dim] == 1) continue;
    if (view.strides[dim] != expected) return false;
    expected *= view.shape[dim];
  }
  return true;
}

bool is_dense(const TensorView& view) {
  if (has_index_order(view)) return true;
  std::vector<int> dims(static_cast<std::size_t>(view.ndim));
  std::iota(dims.begin(), dims.end(), 0);
  std::sort(dims.begin(), dims.end(),
            [&](int a, int b) { return view.strides[a] < view.strides[b]; });
  return has_no_gaps(view, dims);
}

// Raise for layouts that DLPack cannot describe: sparse, meta, quantized, nested.
[[noreturn]] void refuse_layout(PyObject* object, const char* operation, ArgName name) {
  const py::error_already_set refused;
  const std::string text = py::str(refused.value());
  const std::string why = text.substr(0, text.find('\n'));
  fail(ErrorKind::kUnsupported, operation, ": ", name.text(), " has layout ",
       text_of(object, "layout"), " on device ", text_of(object, "device"), " and dtype ",
       text_of(object, "dtype"), "; expected a dense (strided) tensor with memory of its own (",
       why, ")");
}

}  // namespace

bool try_view(PyObject* object, TensorView* view) {
  if (TorchFunctions::get().read(object, view)) return true;
  const dlpack::ExchangeApi* api = exchange_api_of(Py_TYPE(object));
  dlpack::Tensor raw{};
  if (api == nullptr) return false;
  if (api->dltensor_from_py_object(object, &raw) != 0) {
    PyErr_Clear();
    return false;
  }
  fill_view(object, raw, view);
  return has_known_device(raw) && read_dtype(raw, &view->dtype);
}

StridedView TensorView::strided() const {
  const Sign sign = !is_negated ? Sign::kPlain : is_float(dtype) ? Sign::kBit : Sign::kComplement;
  return {data, item_bytes(dtype), {shape, shape + ndim}, {strides, strides + ndim}, sign};
}

std::string ArgName::text() const {
  if (index < 0) return argument;
  if (inner >= 0) return join(argument, "[", index, "][", inner, "]");
  return join(argument, "[", index, "]");
}

std::string type_text(PyObject* object) {
  if (object == Py_None) return "None";
  const std::string_view name = Py_TYPE(object)->tp_name;
  const bool begins_with_vowel = name.find_first_of("aeiouAEIOU") == 0;
  return join(begins_with_vowel ? "an " : "a ", name);
}

void read_tensor(PyObject* object, const char* operation, ArgName name, TensorView* view) {
  const dlpack::ExchangeApi* api = exchange_api_of(Py_TYPE(object));
  if (api == nullptr) {
    fail(ErrorKind::kArgument, operation, ": ", name.text(), " is ", type_text(object),
         ", expected a tensor, or an array of NumPy or CuPy");
  }
  dlpack::Tensor raw{};
  if (api->dltensor_from_py_object(object, &raw) != 0) refuse_layout(object, operation, name);
  fill_view(object, raw, view);
  if (!has_known_device(raw)) {
    fail(ErrorKind::kUnsupported, operation, ": ", name.text(), " is on device ",
         text_of(object, "device"), "; supported are cpu and cuda");
  }
  if (!read_dtype(raw, &view->dtype)) {
    fail(ErrorKind::kUnsupported, operation, ": ", name.text(), " has dtype ",
         text_of(object, "dtype"),
         "; supported are float64, float32, float16, bfloat16, int8, uint8, int32 and int64");
  }
  if (raw.data == nullptr && view->numel > 0) {
    fail(ErrorKind::kUnsupported, operation, ": ", name.text(),
         " has no memory behind it (a fake or functional tensor?); expected a real tensor");
  }
  view->is_negated = TorchFunctions::get().is_neg(object);
  view->is_dense = !view->is_negated && is_dense(*view);
}

TensorIdentity::TensorIdentity(PyObject* tensor) {
  TensorView view;
  read_tensor(tensor, "all_reduce", {"tensor"}, &view);
  data_ = view.data;
  device_ = view.device;
  dtype_ = view.dtype;
  is_negated_ = view.is_negated;
  layout_.assign(view.shape, view.shape + view.ndim);
  layout_.insert(layout_.end(), view.strides, view.strides + view.ndim);
}

bool TensorIdentity::matches(const TensorView& view) const {
  const auto ndim = static_cast<std::size_t>(view.ndim);
  // is_neg() can change at equal memory and layout, for example by an assignment to `.data`.
  return view.data == data_ && view.device == device_ && view.dtype == dtype_ &&
         2 * ndim == layout_.size() && std::equal(view.shape, view.shape + ndim, layout_.begin()) &&
         std::equal(view.strides, view.strides + ndim, layout_.begin() + view.ndim) &&
         TorchFunctions::get().is_neg(view.object) == is_negated_;
}

std::string device_name(int device) { return device == kHost ? "cpu" : join("cuda:", device); }

void* current_stream(int device) {
  auto* tensor_type = reinterpret_cast<PyTypeObject*>(TorchNames::get().tensor_type.ptr());
  const dlpack::ExchangeApi* api = exchange_api_of(tensor_type);
  void* stream = nullptr;
  if (api->current_work_stream(dlpack::kCuda, device, &stream) != 0) throw py::error_already_set();
  return stream;
}

bool is_plain_tensor(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == TorchNames::get().tensor_type.ptr();
}

py::object as_tensor(PyObject* object, const char* operation, const std::string& name) {
  const auto given = py::reinterpret_borrow<py::object>(object);
  if (is_plain_tensor(object)) return given;
  const py::object arrays = py::module_::import("pyringar.comm.arrays");
  if (!arrays.attr("is_array")(given).is(py::bool_(true))) return given;
  return arrays.attr("as_tensor")(given, join(operation, ": ", name));
}

bool same_layout(const TensorView& view, const TensorView& first) {
  if (view.numel <= 1) return true;
  if (view.is_negated != first.is_negated) return false;
  for (int dim = 0; dim < view.ndim; ++dim) {
    if (view.shape[dim] != 1 && view.strides[dim] != first.strides[dim]) return false;
  }
  return true;
}

bool has_index_order(const TensorView& view) {
  return view.numel <= 1 || has_no_gaps(view, std::views::iota(0, view.ndim) | std::views::reverse);
}

TensorReadGuard::TensorReadGuard() {
  if (last_reader_ && *last_reader_ != std::this_thread::get_id()) {
    PyEval_SaveThread();
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  ++num_threads_;
}

void TensorReadGuard::end() {
  last_reader_ = std::this_thread::get_id();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (num_threads_ > 0 && std::chrono::steady_clock::now() < deadline) {
    PyThreadState* state = PyEval_SaveThread();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    PyEval_RestoreThread(state);
  }
}

py::list storages_of(std::initializer_list<py::handle> lists) {
  py::list storages;
  for (const py::handle list : lists) {
    if (list.is_none()) continue;
    for (const py::handle tensor : list) {
      const auto storage = py::reinterpret_steal<py::object>(
          PyObject_CallMethodNoArgs(tensor.ptr(), TorchNames::get().untyped_storage.ptr()));
      if (!storage) throw py::error_already_set();
      storages.append(storage);
    }
  }
  return storages;
}

}  // namespace pyringar
