// tensor: DLPack's exchange table for the data, torch's attributes for what DLPack does not say.

#include "bindings/tensor.h"

#include <pybind11/cast.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <numeric>
#include <string_view>
#include <utility>

#include "bindings/torch_functions.h"
#include "core/error.h"

namespace pyringar {

namespace {

// The C structures of DLPack 1.3 by which torch (2.11 and up) shows a tensor, and the function
// table of a tensor type, __dlpack_c_exchange_api__: stable within the major version. The result of
// dltensor_from_py_object is valid while the tensor lives and is not resized.
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

py::object attribute(PyObject* object, const char* name) {
  auto value = py::reinterpret_steal<py::object>(PyObject_GetAttrString(object, name));
  if (!value) throw_python_error();
  return value;
}

py::object import_module(const char* name) {
  auto module = py::reinterpret_steal<py::object>(PyImport_ImportModule(name));
  if (!module) throw_python_error();
  return module;
}

py::object call(const py::object& function, PyObject* argument = nullptr) {
  auto result = py::reinterpret_steal<py::object>(
      argument == nullptr ? PyObject_CallNoArgs(function.ptr())
                          : PyObject_CallOneArg(function.ptr(), argument));
  if (!result) throw_python_error();
  return result;
}

std::string text_of(PyObject* object, const char* name) { return py::str(attribute(object, name)); }

// Python objects that every call needs, looked up once and never destroyed.
struct TorchNames {
  py::object tensor_type = attribute(import_module("torch").ptr(), "Tensor");
  py::object untyped_storage =
      py::reinterpret_steal<py::object>(PyUnicode_InternFromString("untyped_storage"));

  static TorchNames& get() {
    // Guarded by the GIL, and by no lock of C++'s: looking up may give the GIL away, to a thread
    // that would wait for that lock. It then looks up too, and the last one's are kept.
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
  if (is_tensor < 0) throw_python_error();
  if (is_tensor == 0) return nullptr;
  const py::object capsule = attribute(as_object, "__dlpack_c_exchange_api__");
  const auto* api = static_cast<const dlpack::ExchangeApi*>(
      PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
  if (api == nullptr) throw_python_error();
  while (api != nullptr && api->major_version != dlpack::kMajorVersion) api = api->previous;
  if (api == nullptr || api->dltensor_from_py_object == nullptr) {
    fail(ErrorKind::kUnsupported, "this torch offers no DLPack 1.x exchange table");
  }
  Py_INCREF(as_object);  // a type that is known must not be replaced by another at its address
  Py_XDECREF(known_type);
  known_type = type;
  known_api = api;
  return api;
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
  view->ndim = raw.ndim;
  view->shape = raw.shape;
  view->strides = raw.strides;
  view->count();
}

bool is_dense(const TensorView& view) {
  if (has_index_order(view)) return true;
  std::vector<int> dims(static_cast<std::size_t>(view.ndim));
  std::iota(dims.begin(), dims.end(), 0);
  std::sort(dims.begin(), dims.end(),
            [&](int a, int b) { return view.strides[a] < view.strides[b]; });
  std::int64_t expected = 1;
  for (const int dim : dims) {
    if (view.shape[dim] == 1) continue;
    if (view.strides[dim] != expected) return false;
    expected *= view.shape[dim];
  }
  return true;
}

std::string describe_shape(const TensorView& view) {
  std::string text = "(";
  for (int dim = 0; dim < view.ndim; ++dim) text += join(dim == 0 ? "" : ", ", view.shape[dim]);
  return text + (view.ndim == 1 ? ",)" : ")");
}

// What torch refused to show, in the words of the promise: sparse, meta, quantized, nested...
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
  if (raw.device_type != dlpack::kCpu && raw.device_type != dlpack::kCuda) return false;
  view->device = raw.device_type == dlpack::kCpu ? kHost : raw.device_id;
  fill_view(object, raw, view);
  return read_dtype(raw, &view->dtype);
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

std::string kind_of(PyObject* object) {
  if (object == Py_None) return "None";
  const std::string_view name = Py_TYPE(object)->tp_name;
  const bool begins_with_vowel = name.find_first_of("aeiouAEIOU") == 0;
  return join(begins_with_vowel ? "an " : "a ", name);
}

void read_tensor(PyObject* object, const char* operation, ArgName name, TensorView* view) {
  const dlpack::ExchangeApi* api = exchange_api_of(Py_TYPE(object));
  if (api == nullptr) {
    fail(ErrorKind::kArgument, operation, ": ", name.text(), " is ", kind_of(object),
         ", expected a tensor, or an array of NumPy or CuPy");
  }
  dlpack::Tensor raw{};
  if (api->dltensor_from_py_object(object, &raw) != 0) refuse_layout(object, operation, name);
  fill_view(object, raw, view);
  if (raw.device_type != dlpack::kCpu && raw.device_type != dlpack::kCuda) {
    fail(ErrorKind::kUnsupported, operation, ": ", name.text(), " is on device ",
         text_of(object, "device"), "; supported are cpu and cuda");
  }
  view->device = raw.device_type == dlpack::kCpu ? kHost : raw.device_id;
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

Place::Place(PyObject* tensor) {
  TensorView view;
  read_tensor(tensor, "all_reduce", {"tensor"}, &view);
  data_ = view.data;
  device_ = view.device;
  dtype_ = view.dtype;
  is_negated_ = view.is_negated;
  layout_.assign(view.shape, view.shape + view.ndim);
  layout_.insert(layout_.end(), view.strides, view.strides + view.ndim);
}

bool Place::is_of(const TensorView& view) const {
  const auto ndim = static_cast<std::size_t>(view.ndim);
  // The sign even of the same object: it may be a new tensor at that address, or have a negated
  // `.data`.
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
  if (api->current_work_stream(dlpack::kCuda, device, &stream) != 0) throw_python_error();
  return stream;
}

bool is_plain_tensor(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == TorchNames::get().tensor_type.ptr();
}

py::object as_tensor(PyObject* object, const char* operation, const std::string& name) {
  if (is_plain_tensor(object)) return py::reinterpret_borrow<py::object>(object);
  const py::object interop = import_module("pyringar.comm.arrays");
  if (call(attribute(interop.ptr(), "is_array"), object).ptr() != Py_True) {
    return py::reinterpret_borrow<py::object>(object);
  }
  const py::str where(join(operation, ": ", name));
  auto tensor = py::reinterpret_steal<py::object>(
      PyObject_CallMethod(interop.ptr(), "as_tensor", "OO", object, where.ptr()));
  if (!tensor) throw_python_error();
  return tensor;
}

bool lie_alike(const TensorView& view, const TensorView& first) {
  if (view.numel <= 1) return true;
  if (view.is_negated != first.is_negated) return false;
  for (int dim = 0; dim < view.ndim; ++dim) {
    if (view.shape[dim] != 1 && view.strides[dim] != first.strides[dim]) return false;
  }
  return true;
}

bool has_index_order(const TensorView& view) {
  if (view.numel <= 1) return true;
  std::int64_t expected = 1;
  for (int dim = view.ndim - 1; dim >= 0; --dim) {
    if (view.shape[dim] == 1) continue;
    if (view.strides[dim] != expected) return false;
    expected *= view.shape[dim];
  }
  return true;
}

Reading::Reading() {
  if (last_reader_ && *last_reader_ != std::this_thread::get_id()) {
    PyEval_SaveThread();
    while (true) std::this_thread::sleep_for(std::chrono::hours(1));
  }
  ++num_threads_;
}

void Reading::end() {
  last_reader_ = std::this_thread::get_id();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(1);
  while (num_threads_ > 0 && std::chrono::steady_clock::now() < deadline) {
    PyThreadState* state = PyEval_SaveThread();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    PyEval_RestoreThread(state);
  }
}

TensorArgs::TensorArgs(const char* operation)
    : operation_(operation), is_recording_(TorchFunctions::get().is_grad_enabled()) {}

void TensorArgs::add(PyObject* object, ArgName name, int rank, int device, bool is_written) {
  TensorView& view = views_.emplace_back();
  names_.push_back(name);
  is_written_.push_back(is_written);
  read_tensor(object, operation_, name, &view);
  if (view.device != device) {
    fail(ErrorKind::kArgument, operation_, ": ", name.text(), " is on ", device_name(view.device),
         ", expected ", device_name(device), ", the device of rank ", rank);
  }
  if (is_written && is_recording_ && TorchFunctions::get().requires_grad(object)) {
    fail(ErrorKind::kArgument, operation_, ": ", name.text(),
         " requires grad, and autograd would not see this in-place change; "
         "call it under torch.no_grad(), or pass .detach()");
  }
}

void TensorArgs::check_agree(std::size_t i, std::size_t first) const {
  const TensorView& a = views_[i];
  const TensorView& b = views_[first];
  const auto differs = [&](const char* what, const std::string& value,
                           const std::string& expected) {
    fail(ErrorKind::kArgument, operation_, ": ", names_[i].text(), " has ", what, " ", value,
         ", but ", names_[first].text(), " has ", expected, "; all ranks must agree");
  };
  if (a.dtype != b.dtype) differs("dtype", dtype_name(a.dtype), dtype_name(b.dtype));
  if (a.ndim != b.ndim || !std::equal(a.shape, a.shape + a.ndim, b.shape)) {
    differs("shape", describe_shape(a), describe_shape(b));
  }
}

void TensorArgs::check_parts(std::size_t whole, std::size_t part, int world_size) const {
  const TensorView& w = views_[whole];
  const TensorView& p = views_[part];
  if (w.dtype != p.dtype) {
    fail(ErrorKind::kArgument, operation_, ": ", names_[part].text(), " has dtype ",
         dtype_name(p.dtype), ", but ", names_[whole].text(), " has ", dtype_name(w.dtype));
  }
  if (w.numel == p.numel * static_cast<std::size_t>(world_size)) return;
  fail(ErrorKind::kArgument, operation_, ": ", names_[whole].text(), " has ", w.numel, " ",
       dtype_name(w.dtype), " elements and ", names_[part].text(), " has ", p.numel, " ",
       dtype_name(p.dtype), "; expected ", world_size, " times as many, one part per rank");
}

bool TensorArgs::is_same(std::size_t i, std::size_t j) const {
  const TensorView& a = views_[i];
  const TensorView& b = views_[j];
  return a.numel > 0 && a.data == b.data && a.is_negated == b.is_negated && lie_alike(a, b);
}

void TensorArgs::check_disjoint(const std::vector<bool>& is_skipped) const {
  if (size() == 1 && views_[0].is_dense) return;
  struct Span {
    const std::byte* first;
    const std::byte* last;
    std::size_t index;
  };
  std::vector<Span> spans;
  spans.reserve(size());
  for (std::size_t i = 0; i < size(); ++i) {
    const TensorView& view = views_[i];
    if (view.numel == 0 || (i < is_skipped.size() && is_skipped[i])) continue;
    if (view.is_dense) {
      spans.push_back({view.data, view.data + view.bytes(), i});
      continue;
    }
    const StridedView strided = view.strided();
    if (overlaps_itself(strided)) {
      fail(ErrorKind::kArgument, operation_, ": ", names_[i].text(), " of shape ",
           describe_shape(view),
           " overlaps itself (an expanded tensor?); expected every element at its own address");
    }
    const ByteSpan bytes = span_of(strided);
    spans.push_back({bytes.first, bytes.last, i});
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.first < b.first; });
  for (std::size_t a = 0; a < spans.size(); ++a) {
    for (std::size_t b = a + 1; b < spans.size() && spans[b].first < spans[a].last; ++b) {
      const std::size_t i = std::min(spans[a].index, spans[b].index);
      const std::size_t j = std::max(spans[a].index, spans[b].index);
      if (!is_written_[i] && !is_written_[j]) continue;
      const bool dense = views_[i].is_dense && views_[j].is_dense;
      if (!dense && !overlap(views_[i].strided(), views_[j].strided())) continue;
      fail(ErrorKind::kArgument, operation_, ": ", names_[j].text(), " shares memory with ",
           names_[i].text(), "; expected a tensor of its own for every rank (a .clone()?)");
    }
  }
}

std::byte* TensorArgs::copy_on_host(std::size_t i, bool is_input, bool is_output,
                                    std::vector<PackedTensor>& packed) const {
  std::shared_ptr<std::byte[]> dense =
      std::make_unique_for_overwrite<std::byte[]>(views_[i].bytes());
  std::byte* data = dense.get();
  packed.push_back({views_[i].strided(), std::move(dense), is_input, is_output});
  return data;
}

std::byte* TensorArgs::copy_by_torch(std::size_t i, bool is_output, const py::list& copies) const {
  PyObject* tensor = views_[i].object;
  const py::object detached = call(attribute(tensor, "detach"));
  const py::object signs = call(attribute(detached.ptr(), "resolve_neg"));
  const py::object dense = call(attribute(signs.ptr(), "contiguous"));
  const auto pair =
      py::reinterpret_steal<py::object>(PyTuple_Pack(2, is_output ? tensor : Py_None, dense.ptr()));
  if (!pair || PyList_Append(copies.ptr(), pair.ptr()) != 0) throw_python_error();
  TensorView copy;
  read_tensor(dense.ptr(), operation_, names_[i], &copy);
  return copy.data;
}

void append(const py::list& list, PyObject* item) {
  if (PyList_Append(list.ptr(), item) != 0) throw_python_error();
}

py::tuple tuple_of(PyObject* sequence) {
  auto items = py::reinterpret_steal<py::tuple>(PySequence_Tuple(sequence));
  if (!items) throw_python_error();
  return items;
}

void throw_python_error() { throw PythonErrorPending{}; }

py::list storages_of(std::initializer_list<py::handle> lists) {
  py::list storages;
  for (const py::handle list : lists) {
    if (list.is_none()) continue;
    for (const py::handle tensor : list) {
      const auto storage = py::reinterpret_steal<py::object>(
          PyObject_CallMethodNoArgs(tensor.ptr(), TorchNames::get().untyped_storage.ptr()));
      if (!storage) throw_python_error();
      append(storages, storage.ptr());
    }
  }
  return storages;
}

}  // namespace pyringar
