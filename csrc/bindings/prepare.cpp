// prepare: reads the lists, checks them, and lays out the pointer tables of a Collective.

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
    if (!is_sequence(raw)) {
      fail(ErrorKind::kArgument, operation, ": ", argument, " is ", kind_of(raw),
           ", expected a list or tuple with one ", per);
    }
    operation_ = operation;
    argument_ = argument;
    items_ = tuple_of(raw);
    if (expected >= 0 && size() != expected) {
      fail(ErrorKind::kArgument, operation, ": ", argument, " has ", size(),
           size() == 1 ? " entry" : " entries", ", expected ", expected, ", one ", per);
    }
  }

  // Arrays of other libraries become tensors that share their memory.
  void adopt_arrays(bool is_indexed = true) {
    const auto is_plain = [&](Py_ssize_t i) { return is_plain_tensor((*this)[i]); };
    Py_ssize_t i = 0;
    while (i < size() && is_plain(i)) ++i;
    if (i == size()) return;
    auto adopted = py::reinterpret_steal<py::tuple>(PyTuple_New(size()));
    if (!adopted) throw_python_error();
    for (i = 0; i < size(); ++i) {
      const std::string name = is_indexed ? join(argument_, "[", i, "]") : argument_;
      PyTuple_SET_ITEM(adopted.ptr(), i, as_tensor((*this)[i], operation_, name).release().ptr());
    }
    items_ = std::move(adopted);
  }

  Py_ssize_t size() const { return PyTuple_GET_SIZE(items_.ptr()); }
  PyObject* operator[](Py_ssize_t i) const { return PyTuple_GET_ITEM(items_.ptr(), i); }
  const py::tuple& items() const { return items_; }

 private:
  const char* operation_;
  std::string argument_;
  py::tuple items_;
};

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

  // Memory of tensor i in the order of its index: its own, or a copy. Dense tensors with equal
  // strides on all ranks need no copy, unless is_flat asks for index order.
  std::byte* memory(std::size_t i, bool is_input, bool is_output, bool is_flat) {
    const TensorView& v = tensors_[i];
    if (v.numel == 0 || (v.is_dense && (!is_flat || has_index_order(v)))) return v.data;
    if (devices_ != nullptr) return tensors_.copy_by_torch(i, is_output, copies_);
    return tensors_.copy_on_host(i, is_input, is_output, collective_.packed);
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
  const int world_size_;
  const std::vector<int>* devices_;
  TensorArgs tensors_;
  Collective collective_;
  py::list copies_;
};

// One tensor, or one list, for each rank. Tensor i of rank r is number r * num_tensors() + i.
class RankLists {
 public:
  RankLists(py::handle given, const char* operation, const char* argument, int world_size,
            bool are_lists)
      : argument_(argument),
        ranks_(given, operation, argument, world_size == 0 ? -1 : world_size,
               are_lists ? "list per rank" : "tensor per rank") {
    if (ranks_.size() == 0) {
      fail(ErrorKind::kArgument, operation, ": ", argument,
           " is empty, expected at least one rank's tensor");
    }
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

  // Adds all tensors, and checks that ranks agree. is_written(rank) says of which.
  template <typename IsWritten>
  void add_to(Builder& builder, IsWritten&& is_written) const {
    builder.reserve(static_cast<std::size_t>(num_ranks() + 1) * num_tensors());
    for (int rank = 0; rank < num_ranks(); ++rank) {
      for (std::size_t i = 0; i < num_tensors(); ++i) {
        const auto inner = lists_.empty() ? -1 : static_cast<int>(i);
        builder.add(at(rank, i), {argument_, rank, inner}, is_written(rank));
        builder.tensors().check_agree(builder.tensors().size() - 1, i);
      }
    }
  }

  // The tensors of the ranks for which is_one(rank) is true.
  template <typename IsOne>
  py::object tensors_of(IsOne&& is_one) const {
    py::list found;
    for (int rank = 0; rank < num_ranks(); ++rank) {
      for (std::size_t i = 0; is_one(rank) && i < num_tensors(); ++i) append(found, at(rank, i));
    }
    return found;
  }
  py::object tensors() const {
    if (lists_.empty()) return ranks_.items();
    return tensors_of([](int) { return true; });
  }

 private:
  PyObject* at(int rank, std::size_t i) const {
    if (lists_.empty()) return ranks_[rank];
    return lists_[static_cast<std::size_t>(rank)][static_cast<Py_ssize_t>(i)];
  }

  const char* argument_;
  Sequence ranks_;
  std::vector<Sequence> lists_;  // empty: one tensor for each rank
};

}  // namespace

PreparedCollective prepare_all_reduce(py::handle tensors, bool are_lists, Reduction reduction,
                                      Algorithm algorithm, Ranks who, bool is_bound) {
  const char* const operation = is_bound ? (are_lists ? "bind_coalesced" : "bind")
                                         : (are_lists ? "all_reduce_coalesced" : "all_reduce");
  const RankLists ranks(tensors, operation, are_lists ? "lists" : "tensors", who.world_size,
                        are_lists);
  const int k = ranks.num_ranks();
  const std::size_t n = ranks.num_tensors();
  Builder builder(operation, reduction, k, who.devices);
  ranks.add_to(builder, [](int) { return true; });
  builder.tensors().check_disjoint();
  builder.choose(algorithm);
  builder.reserve_pointers(n * static_cast<std::size_t>(k));
  for (std::size_t i = 0; i < n; ++i) {
    const bool is_flat = !builder.all_lie_alike(i, n);
    void* const* table = builder.table_end();
    for (int rank = 0; rank < k; ++rank) {
      const std::size_t at = static_cast<std::size_t>(rank) * n + i;
      builder.push(builder.memory(at, true, true, is_flat), rank);
    }
    const TensorView& view = builder.tensors()[i];
    builder.collective().bytes += view.bytes();
    if (k == 1 || view.numel == 0) continue;  // the sum of one is itself
    builder.collective().tensors.push_back({table, table, k, k, view.numel, view.dtype});
  }
  return builder.finish(ranks.tensors());
}

namespace {

// A copy, as bytes: a 16-bit float that is loaded as fp32 loses the payload of a NaN.
Buffers copy_of_bytes(void* const* source, void* const* destinations, int num_destinations,
                      std::size_t bytes) {
  return {source, destinations, 1, num_destinations, bytes, DType::kUInt8};
}

// A reduce-scatter reads wholes, of a chunk per rank, and writes chunks; an all-gather the reverse.
PreparedCollective prepare_chunks(bool scatters, py::handle outputs, py::handle inputs,
                                  Reduction reduction, Algorithm algorithm, Ranks who) {
  const char* operation = scatters ? "reduce_scatter" : "all_gather";
  const int k = who.world_size;
  const auto num = static_cast<std::size_t>(k);
  Sequence out(outputs, operation, "outputs", k, "tensor per rank");
  Sequence in(inputs, operation, "inputs", k, "tensor per rank");
  out.adopt_arrays();
  in.adopt_arrays();
  Builder builder(operation, reduction, k, who.devices);
  for (const bool are_wholes : {true, false}) {
    const bool are_inputs = are_wholes == scatters;
    for (int rank = 0; rank < k; ++rank) {
      const ArgName name{are_inputs ? "inputs" : "outputs", rank};
      builder.add((are_inputs ? in : out)[rank], name, !are_inputs);
    }
  }
  for (std::size_t rank = 0; rank < num; ++rank) {
    builder.tensors().check_agree(rank, 0);
    builder.tensors().check_agree(num + rank, num);
    builder.tensors().check_parts(rank, num + rank, k);
  }
  builder.tensors().check_disjoint();
  std::vector<std::byte*> wholes;
  std::vector<std::byte*> chunks;
  for (std::size_t rank = 0; rank < num; ++rank) {
    wholes.push_back(builder.memory(rank, scatters, !scatters, true));
    chunks.push_back(builder.memory(num + rank, !scatters, scatters, true));
  }
  const TensorView& view = builder.tensors()[0];
  Collective& collective = builder.collective();
  collective.bytes = view.bytes();
  builder.choose(algorithm);
  if (view.numel == 0) return builder.finish(out.items(), in.items());
  builder.reserve_pointers(num * (num + 1));
  const auto push_all = [&](const std::vector<std::byte*>& pointers, std::size_t offset) {
    void* const* table = builder.table_end();
    for (std::size_t rank = 0; rank < num; ++rank) {
      builder.push(pointers[rank] + offset, static_cast<int>(rank));
    }
    return table;
  };
  if (collective.algorithm == Algorithm::kRing) {
    void* const* sources = push_all(scatters ? wholes : chunks, 0);
    void* const* destinations = push_all(scatters ? chunks : wholes, 0);
    collective.tensors.push_back({sources, destinations, k, k, view.numel, view.dtype,
                                  scatters ? RingPhases::kReduceScatter : RingPhases::kAllGather});
    return builder.finish(out.items(), in.items());
  }
  const std::size_t chunk_bytes = view.bytes() / num;
  for (std::size_t c = 0; c < num; ++c) {
    void* const* whole = push_all(wholes, c * chunk_bytes);
    void* const* chunk = builder.table_end();
    builder.push(chunks[c], static_cast<int>(c));
    collective.tensors.push_back(scatters
                                     ? Buffers{whole, chunk, k, 1, view.numel / num, view.dtype}
                                     : copy_of_bytes(chunk, whole, k, chunk_bytes));
  }
  return builder.finish(out.items(), in.items());
}

}  // namespace

PreparedCollective prepare_reduce_scatter(py::handle outputs, py::handle inputs,
                                          Reduction reduction, Algorithm algorithm, Ranks who) {
  return prepare_chunks(true, outputs, inputs, reduction, algorithm, who);
}

PreparedCollective prepare_all_gather(py::handle outputs, py::handle inputs, Algorithm algorithm,
                                      Ranks who) {
  return prepare_chunks(false, outputs, inputs, Reduction{}, algorithm, who);
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
  outputs.adopt_arrays(are_lists);
  Builder builder(operation, reduction, k, who.devices);
  ranks.add_to(builder, [](int) { return false; });
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
  return builder.finish(outputs.items(), ranks.tensors());
}

PreparedCollective prepare_broadcast(py::handle tensors, bool are_lists, int root, Ranks who) {
  const char* operation = are_lists ? "broadcast_coalesced" : "broadcast";
  const int k = who.world_size;
  const RankLists ranks(tensors, operation, are_lists ? "lists" : "tensors", k, are_lists);
  const std::size_t n = ranks.num_tensors();
  Builder builder(operation, Reduction{}, k, who.devices);
  const auto is_written = [root](int rank) { return rank != root; };
  ranks.add_to(builder, is_written);
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
  return builder.finish(ranks.tensors_of(is_written),
                        ranks.tensors_of([root](int rank) { return rank == root; }));
}

}  // namespace pyringar
