// call_cache: see the header.

#include "bindings/call_cache.h"

#include <algorithm>
#include <utility>

namespace pyringar {

namespace {

// Null: there is no first tensor.
const void* memory_of_first(const TensorTuples& tuples) {
  if (tuples.empty() || tuples[0].empty()) return nullptr;
  return memory_of(PyTuple_GET_ITEM(tuples[0].ptr(), 0));
}

// visit(tuple, tensor), until one says false.
template <typename Visit>
bool all_of_tensors(const TensorTuples& tuples, Visit&& visit) {
  for (const py::tuple& tuple : tuples) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple.ptr()); ++i) {
      if (!visit(PyTuple_GET_ITEM(tuple.ptr(), i))) return false;
    }
  }
  return true;
}

}  // namespace

TensorTuples CallCache::tuples_of(py::handle tensors, bool is_coalesced) {
  if (!is_sequence(tensors.ptr())) return {};
  TensorTuples tuples;
  py::tuple outer = tuple_of(tensors.ptr());
  if (!is_coalesced) {
    tuples.push_back(std::move(outer));
    return tuples;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(outer.ptr()); ++i) {
    PyObject* inner = PyTuple_GET_ITEM(outer.ptr(), i);
    if (!is_sequence(inner)) return {};
    tuples.push_back(tuple_of(inner));
  }
  return tuples;
}

std::shared_ptr<const Collective> CallCache::find(const CallKey& key,
                                                  const TensorTuples& tuples) const {
  const Reading reading;
  const auto found = entries_.find(memory_of_first(tuples));
  if (found == entries_.end()) return nullptr;
  // Shared: torch gives the GIL away below, and another thread may then replace the entry.
  const std::shared_ptr<const Entry> shared = found->second;
  const Entry& entry = *shared;
  if (!entry.call || !(entry.key == key)) return nullptr;
  const bool is_same_size =
      std::equal(tuples.begin(), tuples.end(), entry.sizes.begin(), entry.sizes.end(),
                 [](const py::tuple& tuple, std::size_t size) { return tuple.size() == size; });
  if (!is_same_size) return nullptr;
  const bool is_recording = pyringar::is_recording();
  auto place = entry.places.begin();
  const bool is_same = all_of_tensors(tuples, [&](PyObject* tensor) {
    return (place++)->is_of(tensor) && !(is_recording && requires_grad(tensor));
  });
  return is_same ? entry.call : nullptr;
}

void CallCache::keep(const CallKey& key, const TensorTuples& tuples,
                     std::shared_ptr<const Collective> call) {
  const void* first = memory_of_first(tuples);
  if (first == nullptr) return;
  if (entries_.size() >= kMostCalls) entries_.clear();
  const auto entry = std::make_shared<Entry>(Entry{key, {}, {}, nullptr});
  const std::shared_ptr<const Entry> last = std::exchange(entries_[first], entry);
  if (!last || !(last->key == key)) return;
  // Not of arrays of other libraries, nor of empty tensors.
  const auto has_memory = [](PyObject* tensor) { return memory_of(tensor) != nullptr; };
  if (!all_of_tensors(tuples, has_memory)) return;
  for (const py::tuple& tuple : tuples) entry->sizes.push_back(tuple.size());
  all_of_tensors(tuples, [&](PyObject* tensor) {
    entry->places.emplace_back(tensor);
    return true;
  });
  entry->call = std::move(call);
}

}  // namespace pyringar
