// prepare: reads the lists, checks them, and lays out the pointer tables of a Collective.
//
// Floor     bindings
// Tests     tests/test_arguments.py

#include "bindings/prepare.h"

#include "bindings/tensor.h"
#include "core/error.h"

namespace pyringar {

namespace {

// The items of a Python list or tuple, its length checked.
class Sequence {
 public:
  Sequence(py::handle object, const char* operation, const std::string& argument,
           Py_ssize_t expected, const char* per) {
    PyObject* raw = object.ptr();
    if (!PyList_Check(raw) && !PyTuple_Check(raw)) {
      fail(ErrorKind::kArgument, operation, ": ", argument, " is a ", Py_TYPE(raw)->tp_name,
           ", expected a list or tuple with one ", per);
    }
    // A tuple, which is the caller's own or a new one: a list could change under us while the GIL
    // is released.
    items_ = py::reinterpret_steal<py::tuple>(PySequence_Tuple(raw));
    if (!items_) throw_python_error();
    if (expected >= 0 && size() != expected) {
      fail(ErrorKind::kArgument, operation, ": ", argument, " has ", size(), " entries, expected ",
           expected, ", one ", per);
    }
  }

  // Arrays of other libraries become tensors that share their memory.
  void adopt_arrays() {
    const auto is_plain = [&](Py_ssize_t i) { return is_plain_tensor((*this)[i]); };
    Py_ssize_t i = 0;
    while (i < size() && is_plain(i)) ++i;
    if (i == size()) return;
    auto adopted = py::reinterpret_steal<py::tuple>(PyTuple_New(size()));
    if (!adopted) throw_python_error();
    for (i = 0; i < size(); ++i) {
      PyTuple_SET_ITEM(adopted.ptr(), i, as_tensor((*this)[i]).release().ptr());
    }
    items_ = std::move(adopted);
  }

  Py_ssize_t size() const { return PyTuple_GET_SIZE(items_.ptr()); }
  PyObject* operator[](Py_ssize_t i) const { return PyTuple_GET_ITEM(items_.ptr(), i); }
  const py::tuple& items() const { return items_; }

 private:
  py::tuple items_;
};

Py_ssize_t expected_ranks(int world_size) { return world_size == 0 ? -1 : world_size; }

void check_some_rank(const Sequence& sequence, const char* operation, const char* argument) {
  if (sequence.size() == 0) {
    fail(ErrorKind::kArgument, operation, ": ", argument,
         " is empty, expected at least one rank's tensor");
  }
}

void append(const py::list& list, PyObject* item) {
  if (PyList_Append(list.ptr(), item) != 0) throw_python_error();
}

// Collects the tensors of a call, then checks them against each other and lays out pointers.
class Builder {
 public:
  Builder(const char* operation, ReduceOp op, int world_size, const std::vector<int>* devices)
      : operation_(operation), world_size_(world_size), devices_(devices), grad_(operation) {
    collective_.operation = operation;
    collective_.fold = Fold::of(op, world_size);
  }

  void reserve(std::size_t num_tensors) {
    views_.reserve(num_tensors);
    names_.reserve(num_tensors);
  }

  // Returns the index of the view. Written tensors must not be part of an autograd graph.
  std::size_t add(PyObject* object, ArgName name, bool is_written) {
    read_tensor(object, operation_, name, &views_.emplace_back());
    names_.push_back(name);
    check_device(views_.back(), name);
    if (is_written) grad_.check(object, name);
    return views_.size() - 1;
  }

  // Before buffers are laid out for it.
  void choose(Algorithm algorithm) {
    // One rank waits for nobody, and what it has is the result.
    collective_.algorithm = world_size_ == 1 ? Algorithm::kFused : algorithm;
  }

  const TensorView& view(std::size_t i) const { return views_[i]; }
  ArgName name(std::size_t i) const { return names_[i]; }

  void check_pair(std::size_t i, std::size_t first) const {
    check_agrees(views_[i], names_[i], views_[first], names_[first], operation_);
  }

  // Whether views first, first + step, ..., one per rank, lie alike.
  bool all_lie_alike(std::size_t first, std::size_t step) const {
    for (std::size_t i = first + step; i < views_.size(); i += step) {
      if (!lie_alike(views_[i], views_[first])) return false;
    }
    return true;
  }

  // One output of world_size chunks against one chunk, in dtype and number of elements.
  void check_chunk(std::size_t whole, std::size_t chunk) const {
    const TensorView& w = views_[whole];
    const TensorView& c = views_[chunk];
    if (w.dtype != c.dtype) check_pair(chunk, whole);
    if (w.numel != c.numel * static_cast<std::size_t>(world_size_)) {
      fail(ErrorKind::kArgument, operation_, ": ", names_[whole].text(), " has ", w.numel,
           " elements and ", names_[chunk].text(), " has ", c.numel, "; expected ", world_size_,
           " times as many, one part per rank");
    }
  }

  void check_all_disjoint() const { check_disjoint(views_, names_, operation_); }

  // Memory of view i in the order of its index: its own, or a packed copy. Dense tensors that lie
  // alike on all ranks need no copy, whatever their order; is_flat says that index order is needed.
  void* memory(std::size_t i, bool is_input, bool is_output, bool is_flat) {
    const TensorView& v = views_[i];
    if (v.numel == 0) return v.data;
    if (v.is_dense && (!is_flat || has_index_order(v))) return v.data;
    if (devices_ != nullptr) return torch_copy(v, names_[i], is_output);
    auto dense = std::make_unique_for_overwrite<std::byte[]>(v.bytes());
    collective_.staged.push_back({v.strided(), std::move(dense), is_input, is_output});
    return collective_.staged.back().dense.get();
  }

  // Pointer tables are filled front to back into memory reserved once, so that they stay put.
  void reserve_pointers(std::size_t n) {
    collective_.pointers.reserve(n);
    collective_.ranks.reserve(n);
  }
  void* const* table_end() { return collective_.pointers.data() + collective_.pointers.size(); }
  void push(void* pointer, int rank) {
    collective_.pointers.push_back(pointer);
    collective_.ranks.push_back(rank);
  }

  Prepared finish(py::object written, py::object read = py::none()) {
    return {std::move(collective_), std::move(written), std::move(read), std::move(copies_)};
  }
  Collective& collective() { return collective_; }
  int world_size() const { return world_size_; }

 private:
  void check_device(const TensorView& view, ArgName name) const {
    const auto rank = static_cast<std::size_t>(name.index);
    const int expected = devices_ == nullptr ? kHost : (*devices_)[rank];
    if (view.device == expected) return;
    fail(ErrorKind::kArgument, operation_, ": ", name.text(), " is on ", device_name(view.device),
         ", expected ", device_name(expected), ", the device of rank ", rank);
  }

  // Made by torch, on its current stream, where our kernels also go.
  void* torch_copy(const TensorView& view, ArgName name, bool is_output) {
    const py::object dense = packed(view.object);
    PyObject* target = is_output ? view.object : Py_None;
    const auto pair = py::reinterpret_steal<py::object>(PyTuple_Pack(2, target, dense.ptr()));
    if (!pair) throw_python_error();
    append(copies_, pair.ptr());
    TensorView copy;
    read_tensor(dense.ptr(), operation_, name, &copy);
    return copy.data;
  }

  const char* operation_;
  const int world_size_;
  const std::vector<int>* devices_;
  GradGuard grad_;
  Collective collective_;
  py::list copies_;
  std::vector<TensorView> views_;
  std::vector<ArgName> names_;
};

// One tensor over all ranks, pointers already pushed: input and output are the same memory.
void add_in_place(Builder& builder, void* const* table, const TensorView& view) {
  Collective& collective = builder.collective();
  collective.bytes += view.bytes();
  if (builder.world_size() == 1 || view.numel == 0) return;  // the sum of one is itself
  const int k = builder.world_size();
  collective.tensors.push_back({table, table, k, k, view.numel, view.dtype});
}

}  // namespace

Prepared prepare_all_reduce(py::handle tensors, ReduceOp op, Algorithm algorithm, Ranks who,
                            const char* operation) {
  Sequence ranks(tensors, operation, "tensors", expected_ranks(who.world_size), "tensor per rank");
  check_some_rank(ranks, operation, "tensors");
  ranks.adopt_arrays();
  const int k = static_cast<int>(ranks.size());
  Builder builder(operation, op, k, who.devices);
  builder.reserve(static_cast<std::size_t>(k));
  for (int rank = 0; rank < k; ++rank) {
    builder.add(ranks[rank], {"tensors", rank}, true);
    builder.check_pair(static_cast<std::size_t>(rank), 0);
  }
  builder.check_all_disjoint();
  builder.choose(algorithm);
  builder.reserve_pointers(static_cast<std::size_t>(k));
  const bool is_flat = !builder.all_lie_alike(0, 1);
  void* const* table = builder.table_end();
  for (int rank = 0; rank < k; ++rank) {
    builder.push(builder.memory(static_cast<std::size_t>(rank), true, true, is_flat), rank);
  }
  add_in_place(builder, table, builder.view(0));
  return builder.finish(ranks.items());
}

Prepared prepare_all_reduce_coalesced(py::handle lists, ReduceOp op, Algorithm algorithm,
                                      Ranks who) {
  constexpr const char* kOperation = "all_reduce_coalesced";
  const Sequence ranks(lists, kOperation, "lists", expected_ranks(who.world_size), "list per rank");
  check_some_rank(ranks, kOperation, "lists");
  const int k = static_cast<int>(ranks.size());
  Builder builder(kOperation, op, k, who.devices);
  py::list written;
  std::vector<Sequence> tensors;
  for (int rank = 0; rank < k; ++rank) {
    const Py_ssize_t expected = rank == 0 ? -1 : tensors[0].size();
    tensors.emplace_back(ranks[rank], kOperation, join("lists[", rank, "]"), expected,
                         "tensor per parameter, as in lists[0]");
    tensors.back().adopt_arrays();
    if (rank == 0) builder.reserve(static_cast<std::size_t>(k * tensors[0].size()));
    for (Py_ssize_t i = 0; i < tensors.back().size(); ++i) {
      PyObject* tensor = tensors.back()[i];
      const std::size_t at = builder.add(tensor, {"lists", rank, static_cast<int>(i)}, true);
      builder.check_pair(at, static_cast<std::size_t>(i));
      append(written, tensor);
    }
  }
  builder.check_all_disjoint();
  const auto num_tensors = static_cast<std::size_t>(tensors[0].size());
  builder.choose(algorithm);
  builder.reserve_pointers(num_tensors * static_cast<std::size_t>(k));
  for (std::size_t i = 0; i < num_tensors; ++i) {
    const bool is_flat = !builder.all_lie_alike(i, num_tensors);
    void* const* table = builder.table_end();
    for (int rank = 0; rank < k; ++rank) {
      const std::size_t at = static_cast<std::size_t>(rank) * num_tensors + i;
      builder.push(builder.memory(at, true, true, is_flat), rank);
    }
    add_in_place(builder, table, builder.view(i));
  }
  return builder.finish(written);
}

namespace {

// The two collectives between whole buffers (one per rank, world_size chunks) and chunks (one per
// rank): reads both lists, written ones marked, and checks sizes.
struct WholeAndChunks {
  std::vector<void*> wholes;
  std::vector<void*> chunks;
  std::size_t numel;  // of a whole
  DType dtype;
};

WholeAndChunks read_whole_and_chunks(Builder& builder, const Sequence& wholes,
                                     const char* whole_name, const Sequence& chunks,
                                     const char* chunk_name, bool chunks_are_written) {
  const int k = builder.world_size();
  for (int rank = 0; rank < k; ++rank) {
    builder.add(wholes[rank], {whole_name, rank}, !chunks_are_written);
  }
  for (int rank = 0; rank < k; ++rank) {
    builder.add(chunks[rank], {chunk_name, rank}, chunks_are_written);
  }
  const auto size = static_cast<std::size_t>(k);
  for (std::size_t rank = 0; rank < size; ++rank) {
    builder.check_pair(rank, 0);
    builder.check_pair(size + rank, size);
    builder.check_chunk(rank, size + rank);
  }
  builder.check_all_disjoint();
  WholeAndChunks memory{{}, {}, builder.view(0).numel, builder.view(0).dtype};
  for (std::size_t rank = 0; rank < size; ++rank) {
    memory.wholes.push_back(builder.memory(rank, chunks_are_written, !chunks_are_written, true));
    memory.chunks.push_back(
        builder.memory(size + rank, !chunks_are_written, chunks_are_written, true));
  }
  builder.collective().bytes = builder.view(0).bytes();
  return memory;
}

void* at_chunk(void* whole, const WholeAndChunks& memory, int world_size, int chunk) {
  const std::size_t begin = chunk_range(memory.numel, world_size, chunk).begin;
  return static_cast<std::byte*>(whole) + begin * item_bytes(memory.dtype);
}

// A copy, as bytes: a 16-bit float that is loaded as fp32 loses the payload of a NaN.
Buffers copy_of_bytes(void* const* source, void* const* destinations, int num_destinations,
                      std::size_t bytes) {
  return {source, destinations, 1, num_destinations, bytes, DType::kUInt8};
}

void push_all(Builder& builder, const std::vector<void*>& pointers) {
  for (std::size_t rank = 0; rank < pointers.size(); ++rank) {
    builder.push(pointers[rank], static_cast<int>(rank));
  }
}

void push_chunks(Builder& builder, const WholeAndChunks& memory, int chunk) {
  for (std::size_t rank = 0; rank < memory.wholes.size(); ++rank) {
    builder.push(at_chunk(memory.wholes[rank], memory, builder.world_size(), chunk),
                 static_cast<int>(rank));
  }
}

}  // namespace

Prepared prepare_reduce_scatter(py::handle outputs, py::handle inputs, ReduceOp op,
                                Algorithm algorithm, Ranks who) {
  constexpr const char* kOperation = "reduce_scatter";
  const int world_size = who.world_size;
  Sequence out(outputs, kOperation, "outputs", world_size, "tensor per rank");
  Sequence in(inputs, kOperation, "inputs", world_size, "tensor per rank");
  out.adopt_arrays();
  in.adopt_arrays();
  Builder builder(kOperation, op, world_size, who.devices);
  const WholeAndChunks memory = read_whole_and_chunks(builder, in, "inputs", out, "outputs", true);
  const auto k = static_cast<std::size_t>(world_size);
  Collective& collective = builder.collective();
  builder.choose(algorithm);
  if (memory.numel == 0) return builder.finish(out.items(), in.items());
  if (collective.algorithm == Algorithm::kRing) {
    builder.reserve_pointers(2 * k);
    void* const* sources = builder.table_end();
    push_all(builder, memory.wholes);
    void* const* destinations = builder.table_end();
    push_all(builder, memory.chunks);
    collective.tensors.push_back({sources, destinations, world_size, world_size, memory.numel,
                                  memory.dtype, RingPhases::kReduceScatter});
    return builder.finish(out.items(), in.items());
  }
  builder.reserve_pointers(k * (k + 1));
  for (int chunk = 0; chunk < world_size; ++chunk) {
    void* const* sources = builder.table_end();
    push_chunks(builder, memory, chunk);
    void* const* destination = builder.table_end();
    builder.push(memory.chunks[static_cast<std::size_t>(chunk)], chunk);
    collective.tensors.push_back(
        {sources, destination, world_size, 1, memory.numel / k, memory.dtype});
  }
  return builder.finish(out.items(), in.items());
}

Prepared prepare_all_gather(py::handle outputs, py::handle inputs, Algorithm algorithm, Ranks who) {
  constexpr const char* kOperation = "all_gather";
  const int world_size = who.world_size;
  Sequence out(outputs, kOperation, "outputs", world_size, "tensor per rank");
  Sequence in(inputs, kOperation, "inputs", world_size, "tensor per rank");
  out.adopt_arrays();
  in.adopt_arrays();
  Builder builder(kOperation, ReduceOp::kSum, world_size, who.devices);
  const WholeAndChunks memory = read_whole_and_chunks(builder, out, "outputs", in, "inputs", false);
  const auto k = static_cast<std::size_t>(world_size);
  Collective& collective = builder.collective();
  builder.choose(algorithm);
  if (memory.numel == 0) return builder.finish(out.items(), in.items());
  if (collective.algorithm == Algorithm::kRing) {
    builder.reserve_pointers(2 * k);
    void* const* sources = builder.table_end();
    push_all(builder, memory.chunks);
    void* const* destinations = builder.table_end();
    push_all(builder, memory.wholes);
    collective.tensors.push_back({sources, destinations, world_size, world_size, memory.numel,
                                  memory.dtype, RingPhases::kAllGather});
    return builder.finish(out.items(), in.items());
  }
  builder.reserve_pointers(k * (k + 1));
  for (int chunk = 0; chunk < world_size; ++chunk) {
    void* const* source = builder.table_end();
    builder.push(memory.chunks[static_cast<std::size_t>(chunk)], chunk);
    void* const* destinations = builder.table_end();
    push_chunks(builder, memory, chunk);
    const std::size_t bytes = memory.numel / k * item_bytes(memory.dtype);
    collective.tensors.push_back(copy_of_bytes(source, destinations, world_size, bytes));
  }
  return builder.finish(out.items(), in.items());
}

Prepared prepare_broadcast(py::handle tensors, int root, Ranks who) {
  constexpr const char* kOperation = "broadcast";
  const int world_size = who.world_size;
  Sequence ranks(tensors, kOperation, "tensors", world_size, "tensor per rank");
  if (root < 0 || root >= world_size) {
    fail(ErrorKind::kArgument, kOperation, ": root is ", root, ", expected a rank from 0 to ",
         world_size - 1);
  }
  ranks.adopt_arrays();
  Builder builder(kOperation, ReduceOp::kSum, world_size, who.devices);
  py::list written;
  for (int rank = 0; rank < world_size; ++rank) {
    builder.add(ranks[rank], {"tensors", rank}, rank != root);
    builder.check_pair(static_cast<std::size_t>(rank), 0);
    if (rank != root) append(written, ranks[rank]);
  }
  builder.check_all_disjoint();
  builder.reserve_pointers(static_cast<std::size_t>(world_size));
  const bool is_flat = !builder.all_lie_alike(0, 1);
  void* const* source = builder.table_end();
  builder.push(builder.memory(static_cast<std::size_t>(root), true, false, is_flat), root);
  void* const* destinations = builder.table_end();
  for (int rank = 0; rank < world_size; ++rank) {
    if (rank == root) continue;
    builder.push(builder.memory(static_cast<std::size_t>(rank), false, true, is_flat), rank);
  }
  const TensorView& first = builder.view(0);
  Collective& collective = builder.collective();
  collective.bytes = first.bytes();
  if (world_size > 1 && first.numel > 0) {
    collective.tensors.push_back(
        copy_of_bytes(source, destinations, world_size - 1, first.bytes()));
  }
  return builder.finish(written, ranks.items());
}

}  // namespace pyringar
