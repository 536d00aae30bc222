// prepare: reads the lists, checks them, and lays out the pointer tables of a Collective.
//
// Tests     tests/conformance/test_refused.py

#include "bindings/prepare.h"

#include <array>

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
      fail(ErrorKind::kArgument, operation, ": ", argument, " is ", kind_of(raw),
           ", expected a list or tuple with one ", per);
    }
    // A tuple, which is the caller's own or a new one: a list could change under us while the GIL
    // is released.
    items_ = py::reinterpret_steal<py::tuple>(PySequence_Tuple(raw));
    if (!items_) throw_python_error();
    if (expected >= 0 && size() != expected) {
      fail(ErrorKind::kArgument, operation, ": ", argument, " has ", size(),
           size() == 1 ? " entry" : " entries", ", expected ", expected, ", one ", per);
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
  Builder(const char* operation, Reduction reduction, int world_size,
          const std::vector<int>* devices)
      : world_size_(world_size), devices_(devices), tensors_(operation) {
    collective_.operation = operation;
    collective_.fold = Fold::of(reduction, world_size);
    collective_.num_ranks = world_size;
  }

  void reserve(std::size_t num_tensors) { tensors_.reserve(num_tensors); }
  void add(PyObject* object, ArgName name, bool is_written) {
    add(object, name, name.index, is_written);
  }
  void add(PyObject* object, ArgName name, int rank, bool is_written) {
    const int device = devices_ == nullptr ? kHost : (*devices_)[static_cast<std::size_t>(rank)];
    tensors_.add(object, name, rank, device, is_written);
  }
  const TensorArgs& tensors() const { return tensors_; }

  // Before buffers are laid out for it.
  void choose(Algorithm algorithm) {
    // world_size 1: nothing to reduce, nobody to wait for.
    collective_.algorithm = world_size_ == 1 ? Algorithm::kFused : algorithm;
  }

  // Whether tensors first, first + step, ..., one per rank, lie alike.
  bool all_lie_alike(std::size_t first, std::size_t step) const {
    for (std::size_t i = first + step; i < tensors_.size(); i += step) {
      if (!lie_alike(tensors_[i], tensors_[first])) return false;
    }
    return true;
  }

  // Memory of tensor i in the order of its index: its own, or a packed copy. Dense tensors that lie
  // alike on all ranks need no copy, whatever their order; is_flat says that index order is needed.
  void* memory(std::size_t i, bool is_input, bool is_output, bool is_flat) {
    const TensorView& v = tensors_[i];
    if (v.numel == 0) return v.data;
    if (v.is_dense && (!is_flat || has_index_order(v))) return v.data;
    if (devices_ != nullptr) return torch_copy(i, is_output);
    std::shared_ptr<std::byte[]> dense = std::make_unique_for_overwrite<std::byte[]>(v.bytes());
    std::byte* data = dense.get();
    collective_.packed.push_back({v.strided(), std::move(dense), is_input, is_output});
    return data;
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

  PreparedCollective finish(py::object written, py::object read = py::none()) {
    return {std::move(collective_), std::move(written), std::move(read), std::move(copies_)};
  }
  Collective& collective() { return collective_; }
  int world_size() const { return world_size_; }

 private:
  // Made by torch, on its current stream, where our kernels also go.
  void* torch_copy(std::size_t i, bool is_output) {
    PyObject* tensor = tensors_[i].object;
    const py::object dense = packed(tensor);
    const auto pair = py::reinterpret_steal<py::object>(
        PyTuple_Pack(2, is_output ? tensor : Py_None, dense.ptr()));
    if (!pair) throw_python_error();
    append(copies_, pair.ptr());
    TensorView copy;
    read_tensor(dense.ptr(), tensors_.operation(), tensors_.name(i), &copy);
    return copy.data;
  }

  const int world_size_;
  const std::vector<int>* devices_;
  TensorArgs tensors_;
  Collective collective_;
  py::list copies_;
};

// One tensor, or one list of tensors, for each rank. Tensor i of rank r is tensor
// r * num_tensors() + i of the builder.
class RankLists {
 public:
  RankLists(py::handle given, const char* operation, const char* argument, int world_size,
            bool are_lists)
      : argument_(argument),
        ranks_(given, operation, argument, expected_ranks(world_size),
               are_lists ? "list per rank" : "tensor per rank") {
    check_some_rank(ranks_, operation, argument);
    if (!are_lists) ranks_.adopt_arrays();
    for (int rank = 0; are_lists && rank < num_ranks(); ++rank) {
      const Py_ssize_t expected = rank == 0 ? -1 : lists_[0].size();
      lists_.emplace_back(ranks_[rank], operation, join(argument, "[", rank, "]"), expected,
                          "tensor per parameter, as in lists[0]");
      lists_.back().adopt_arrays();
    }
  }

  int num_ranks() const { return static_cast<int>(ranks_.size()); }
  std::size_t num_tensors() const {
    return lists_.empty() ? 1 : static_cast<std::size_t>(lists_[0].size());
  }

  // Adds all tensors, checks that ranks agree, and returns the list of those that are not written
  // and the list of those that are. is_written(rank) says which.
  template <typename IsWritten>
  std::array<py::list, 2> add_to(Builder& builder, IsWritten&& is_written) const {
    std::array<py::list, 2> added;
    builder.reserve(static_cast<std::size_t>(num_ranks() + 1) * num_tensors());
    for (int rank = 0; rank < num_ranks(); ++rank) {
      for (std::size_t i = 0; i < num_tensors(); ++i) {
        const auto inner = static_cast<int>(i);
        PyObject* tensor =
            lists_.empty() ? ranks_[rank] : lists_[static_cast<std::size_t>(rank)][inner];
        builder.add(tensor, {argument_, rank, lists_.empty() ? -1 : inner}, is_written(rank));
        builder.tensors().check_agree(builder.tensors().size() - 1, i);
        append(added[is_written(rank) ? 1 : 0], tensor);
      }
    }
    return added;
  }

 private:
  const char* argument_;
  Sequence ranks_;
  std::vector<Sequence> lists_;  // empty: one tensor for each rank
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

PreparedCollective prepare_all_reduce(py::handle tensors, Reduction reduction, Algorithm algorithm,
                                      Ranks who, const char* operation) {
  Sequence ranks(tensors, operation, "tensors", expected_ranks(who.world_size), "tensor per rank");
  check_some_rank(ranks, operation, "tensors");
  ranks.adopt_arrays();
  const int k = static_cast<int>(ranks.size());
  Builder builder(operation, reduction, k, who.devices);
  builder.reserve(static_cast<std::size_t>(k));
  for (int rank = 0; rank < k; ++rank) {
    builder.add(ranks[rank], {"tensors", rank}, true);
    builder.tensors().check_agree(static_cast<std::size_t>(rank), 0);
  }
  builder.tensors().check_disjoint();
  builder.choose(algorithm);
  builder.reserve_pointers(static_cast<std::size_t>(k));
  const bool is_flat = !builder.all_lie_alike(0, 1);
  void* const* table = builder.table_end();
  for (int rank = 0; rank < k; ++rank) {
    builder.push(builder.memory(static_cast<std::size_t>(rank), true, true, is_flat), rank);
  }
  add_in_place(builder, table, builder.tensors()[0]);
  return builder.finish(ranks.items());
}

PreparedCollective prepare_all_reduce_coalesced(py::handle lists, Reduction reduction,
                                                Algorithm algorithm, Ranks who,
                                                const char* operation) {
  const RankLists ranks(lists, operation, "lists", who.world_size, true);
  const int k = ranks.num_ranks();
  const std::size_t num_tensors = ranks.num_tensors();
  Builder builder(operation, reduction, k, who.devices);
  const auto [_, written] = ranks.add_to(builder, [](int) { return true; });
  builder.tensors().check_disjoint();
  builder.choose(algorithm);
  builder.reserve_pointers(num_tensors * static_cast<std::size_t>(k));
  for (std::size_t i = 0; i < num_tensors; ++i) {
    const bool is_flat = !builder.all_lie_alike(i, num_tensors);
    void* const* table = builder.table_end();
    for (int rank = 0; rank < k; ++rank) {
      const std::size_t at = static_cast<std::size_t>(rank) * num_tensors + i;
      builder.push(builder.memory(at, true, true, is_flat), rank);
    }
    add_in_place(builder, table, builder.tensors()[i]);
  }
  return builder.finish(written);
}

namespace {

// A copy, as bytes: a 16-bit float that is loaded as fp32 loses the payload of a NaN.
Buffers copy_of_bytes(void* const* source, void* const* destinations, int num_destinations,
                      std::size_t bytes) {
  return {source, destinations, 1, num_destinations, bytes, DType::kUInt8};
}

// The two collectives between whole buffers (one per rank, world_size chunks) and chunks (one per
// rank): a reduce-scatter reads the former and writes the latter, an all-gather the other way
// round.
class ChunkBuilder : public Builder {
 public:
  ChunkBuilder(bool scatters, Reduction reduction, Ranks who)
      : Builder(scatters ? "reduce_scatter" : "all_gather", reduction, who.world_size, who.devices),
        scatters_(scatters),
        k_(static_cast<std::size_t>(who.world_size)) {}

  PreparedCollective prepare(py::handle outputs, py::handle inputs, Algorithm algorithm) {
    const char* operation = tensors().operation();
    Sequence out(outputs, operation, "outputs", world_size(), "tensor per rank");
    Sequence in(inputs, operation, "inputs", world_size(), "tensor per rank");
    out.adopt_arrays();
    in.adopt_arrays();
    if (scatters_) {
      read(in, "inputs", out, "outputs");
    } else {
      read(out, "outputs", in, "inputs");
    }
    choose(algorithm);
    if (numel_ > 0 && collective().algorithm == Algorithm::kRing) {
      lay_out_ring();
    } else if (numel_ > 0) {
      lay_out_chunks();
    }
    return finish(out.items(), in.items());
  }

 private:
  void read(const Sequence& wholes, const char* whole_name, const Sequence& chunks,
            const char* chunk_name) {
    for (int rank = 0; rank < world_size(); ++rank) {
      add(wholes[rank], {whole_name, rank}, !scatters_);
    }
    for (int rank = 0; rank < world_size(); ++rank) {
      add(chunks[rank], {chunk_name, rank}, scatters_);
    }
    for (std::size_t rank = 0; rank < k_; ++rank) {
      tensors().check_agree(rank, 0);
      tensors().check_agree(k_ + rank, k_);
      tensors().check_parts(rank, k_ + rank, world_size());
    }
    tensors().check_disjoint();
    for (std::size_t rank = 0; rank < k_; ++rank) {
      wholes_.push_back(memory(rank, scatters_, !scatters_, true));
      chunks_.push_back(memory(k_ + rank, !scatters_, scatters_, true));
    }
    numel_ = tensors()[0].numel;
    dtype_ = tensors()[0].dtype;
    collective().bytes = tensors()[0].bytes();
  }

  void lay_out_ring() {
    reserve_pointers(2 * k_);
    void* const* sources = push_all(scatters_ ? wholes_ : chunks_);
    void* const* destinations = push_all(scatters_ ? chunks_ : wholes_);
    collective().tensors.push_back(
        {sources, destinations, world_size(), world_size(), numel_, dtype_,
         scatters_ ? RingPhases::kReduceScatter : RingPhases::kAllGather});
  }

  void lay_out_chunks() {
    reserve_pointers(k_ * (k_ + 1));
    collective().tensors.reserve(k_);
    const std::size_t numel = numel_ / k_;
    for (std::size_t c = 0; c < k_; ++c) {
      void* const* whole = table_end();
      for (std::size_t rank = 0; rank < k_; ++rank) {
        push(static_cast<std::byte*>(wholes_[rank]) + c * numel * item_bytes(dtype_),
             static_cast<int>(rank));
      }
      void* const* chunk = table_end();
      push(chunks_[c], static_cast<int>(c));
      collective().tensors.push_back(
          scatters_ ? Buffers{whole, chunk, world_size(), 1, numel, dtype_}
                    : copy_of_bytes(chunk, whole, world_size(), numel * item_bytes(dtype_)));
    }
  }

  void* const* push_all(const std::vector<void*>& pointers) {
    void* const* table = table_end();
    for (std::size_t rank = 0; rank < k_; ++rank) push(pointers[rank], static_cast<int>(rank));
    return table;
  }

  const bool scatters_;
  const std::size_t k_;
  std::vector<void*> wholes_;
  std::vector<void*> chunks_;
  std::size_t numel_ = 0;  // of a whole, a multiple of k_
  DType dtype_ = DType::kUInt8;
};

}  // namespace

PreparedCollective prepare_reduce_scatter(py::handle outputs, py::handle inputs,
                                          Reduction reduction, Algorithm algorithm, Ranks who) {
  return ChunkBuilder(true, reduction, who).prepare(outputs, inputs, algorithm);
}

PreparedCollective prepare_all_gather(py::handle outputs, py::handle inputs, Algorithm algorithm,
                                      Ranks who) {
  return ChunkBuilder(false, Reduction{}, who).prepare(outputs, inputs, algorithm);
}

PreparedCollective prepare_reduce(py::handle output, py::handle inputs, bool are_lists,
                                  Reduction reduction, Algorithm algorithm, int root, Ranks who) {
  const char* operation = are_lists ? "reduce_coalesced" : "reduce";
  const char* name = are_lists ? "outputs" : "output";
  const int k = who.world_size;
  const RankLists ranks(inputs, operation, are_lists ? "lists" : "inputs", k, are_lists);
  const std::size_t n = ranks.num_tensors();
  const auto given = are_lists ? py::reinterpret_borrow<py::object>(output)
                               : py::reinterpret_steal<py::object>(PyTuple_Pack(1, output.ptr()));
  if (!given) throw_python_error();
  Sequence outputs(given, operation, name, static_cast<Py_ssize_t>(n),
                   "tensor per parameter, as in lists[0]");
  outputs.adopt_arrays();
  Builder builder(operation, reduction, k, who.devices);
  const auto [read, _] = ranks.add_to(builder, [](int) { return false; });
  const auto first_output = static_cast<std::size_t>(k) * n;
  const auto first_own = static_cast<std::size_t>(root) * n;
  std::vector<bool> is_in_place;
  std::vector<bool> is_skipped(first_output);  // what the output stands for
  for (std::size_t i = 0; i < n; ++i) {
    const auto index = static_cast<int>(i);
    builder.add(outputs[index], {name, are_lists ? index : -1}, root, true);
    builder.tensors().check_agree(first_output + i, i);
    is_in_place.push_back(builder.tensors().is_same(first_output + i, first_own + i));
    is_skipped[first_own + i] = is_in_place.back();
  }
  builder.tensors().check_disjoint(is_skipped);
  builder.choose(algorithm);
  builder.reserve_pointers(first_output + n);
  for (std::size_t i = 0; i < n; ++i) {
    const bool in_place = is_in_place[i];
    const bool is_flat = !builder.all_lie_alike(i, n);
    void* const* sources = builder.table_end();
    for (int rank = 0; rank < k; ++rank) {
      const std::size_t at = static_cast<std::size_t>(rank) * n + i;
      builder.push(builder.memory(at, true, in_place && rank == root, is_flat), rank);
    }
    void* const* destination = builder.table_end();
    builder.push(in_place ? sources[root] : builder.memory(first_output + i, false, true, is_flat),
                 root);
    const TensorView& view = builder.tensors()[i];
    builder.collective().bytes += view.bytes();
    if (view.numel == 0 || (k == 1 && in_place)) continue;
    builder.collective().tensors.push_back(
        k == 1 ? copy_of_bytes(sources, destination, 1, view.bytes())
               : Buffers{sources, destination, k, 1, view.numel, view.dtype});
  }
  return builder.finish(outputs.items(), read);
}

PreparedCollective prepare_broadcast(py::handle tensors, bool are_lists, int root, Ranks who) {
  const char* operation = are_lists ? "broadcast_coalesced" : "broadcast";
  const int k = who.world_size;
  const RankLists ranks(tensors, operation, are_lists ? "lists" : "tensors", k, are_lists);
  const std::size_t n = ranks.num_tensors();
  Builder builder(operation, Reduction{}, k, who.devices);
  const auto [read, written] = ranks.add_to(builder, [&](int rank) { return rank != root; });
  builder.tensors().check_disjoint();
  builder.reserve_pointers(static_cast<std::size_t>(k) * n);
  for (std::size_t i = 0; i < n; ++i) {
    const bool is_flat = !builder.all_lie_alike(i, n);
    const auto push = [&](int rank) {
      const std::size_t at = static_cast<std::size_t>(rank) * n + i;
      builder.push(builder.memory(at, rank == root, rank != root, is_flat), rank);
    };
    void* const* source = builder.table_end();
    push(root);
    void* const* destinations = builder.table_end();
    for (int rank = 0; rank < k; ++rank) {
      if (rank != root) push(rank);
    }
    const TensorView& view = builder.tensors()[i];
    builder.collective().bytes += view.bytes();
    if (k == 1 || view.numel == 0) continue;
    builder.collective().tensors.push_back(
        copy_of_bytes(source, destinations, k - 1, view.bytes()));
  }
  return builder.finish(written, read);
}

}  // namespace pyringar
