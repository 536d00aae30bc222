// prepare: reads the tensors, checks them, and lays out the pointer tables of a Collective.

#include "bindings/prepare.h"

#include "bindings/tensor.h"
#include "core/error.h"

namespace pyringar {

namespace {

struct OperationTraits {
  const char* name;
  CallKind kind;
  bool is_coalesced;
};

const OperationTraits& traits(Operation operation) {
  static constexpr OperationTraits kTraits[kNumOperations] = {
      {"all_reduce", CallKind::kAllReduce, false},
      {"all_reduce_coalesced", CallKind::kAllReduce, true},
      {"reduce_scatter", CallKind::kReduceScatter, false},
      {"all_gather", CallKind::kAllGather, false},
      {"broadcast", CallKind::kBroadcast, false},
      {"broadcast_coalesced", CallKind::kBroadcast, true},
      {"reduce", CallKind::kReduce, false},
      {"reduce_coalesced", CallKind::kReduce, true},
      {"barrier", CallKind::kBarrier, false},
  };
  return kTraits[static_cast<int>(operation)];
}

// Copies a list or tuple of the expected length into a tuple. expected < 0: any length.
py::tuple read_list(py::handle given, const char* operation, const std::string& argument,
                    Py_ssize_t expected, const char* per) {
  if (!is_sequence(given.ptr())) {
    fail(ErrorKind::kArgument, operation, ": ", argument, " is ", kind_of(given.ptr()),
         ", expected a list or tuple with one ", per);
  }
  py::tuple items = tuple_of(given.ptr());
  const Py_ssize_t size = PyTuple_GET_SIZE(items.ptr());
  if (expected >= 0 && size != expected) {
    fail(ErrorKind::kArgument, operation, ": ", argument, " has ", size,
         size == 1 ? " entry" : " entries", ", expected ", expected, ", one ", per);
  }
  return items;
}

py::tuple tuple_with(PyObject* item) {
  auto tuple = py::reinterpret_steal<py::tuple>(PyTuple_Pack(1, item));
  if (!tuple) throw_python_error();
  return tuple;
}

// Collects the tensors of a call, then checks them against each other and lays out pointers.
class Builder {
 public:
  Builder(const CallOptions& options, const LocalRanks& ranks, int world_size)
      : ranks_(ranks), world_size_(world_size), tensors_(options.name()) {
    collective_.kind = kind_of(options.operation);
    collective_.operation = options.name();
    collective_.root = options.root;
    collective_.world_size = world_size;
    collective_.num_local = ranks.num_local(world_size);
    collective_.fold = Fold::of(options.reduction, world_size);
    // One rank has nothing to reduce and no rank to wait for.
    collective_.algorithm = world_size == 1 ? Algorithm::kFused : options.algorithm;
    collective_.remote.what = options.what;
  }

  void reserve(std::size_t num_tensors) { tensors_.reserve(num_tensors); }
  // rank: local.
  void add(PyObject* object, ArgName name, int rank, bool is_written) {
    const int device =
        ranks_.devices == nullptr ? kHost : (*ranks_.devices)[static_cast<std::size_t>(rank)];
    tensors_.add(object, name, ranks_.first_rank + rank, device, is_written);
  }
  // Of all ranks, which must agree. is_written(rank) says whether the call writes a rank's tensors.
  template <typename IsWritten>
  void add_all(const GivenTensors& given, IsWritten&& is_written) {
    const std::size_t n = given.num_tensors();
    reserve(static_cast<std::size_t>(given.num_ranks() + 1) * n);
    for (int rank = 0; rank < given.num_ranks(); ++rank) {
      for (std::size_t i = 0; i < n; ++i) {
        const std::size_t at = static_cast<std::size_t>(rank) * n + i;
        add(given.at(at), given.name(at), rank, is_written(rank));
        if (rank > 0) tensors_.check_agree(at, i);
      }
    }
  }
  const TensorArgs& tensors() const { return tensors_; }
  bool is_one_of_processes() const { return ranks_.is_one_of_processes; }
  int world_size() const { return world_size_; }

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
    if (ranks_.devices != nullptr) return tensors_.copy_by_torch(i, is_output, copies_);
    return tensors_.copy_on_host(i, is_input, is_output, collective_.packed);
  }

  // Tensor i of one rank among processes, reduced in place: how it lies goes into the digests.
  void add_in_place(std::size_t i, bool is_output) {
    const TensorView& v = tensors_[i];
    if (ranks_.compares_shapes) mix_sizes(v);
    const bool is_permuted = v.is_dense && !has_index_order(v);
    if (is_permuted) {
      mix_strides(v, i);
      collective_.remote.permuted.push_back({i, v.strided(), is_output});
    }
    std::byte* const data = memory(i, true, is_output, !is_permuted);
    collective_.add_local(data, data, v.numel, v.dtype);
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

 private:
  void mix_sizes(const TensorView& view) {
    std::uint64_t& digest = collective_.remote.shapes;
    digest = mix(digest, static_cast<std::uint64_t>(view.ndim));
    for (int dim = 0; dim < view.ndim; ++dim) {
      digest = mix(digest, static_cast<std::uint64_t>(view.shape[dim]));
    }
  }
  void mix_strides(const TensorView& view, std::size_t index) {
    std::uint64_t& digest = collective_.remote.strides;
    digest = mix(digest, index + 1);
    for (int dim = 0; dim < view.ndim; ++dim) {
      if (view.shape[dim] == 1) continue;  // its stride means nothing
      digest = mix(digest, static_cast<std::uint64_t>(view.strides[dim]));
    }
  }

  const LocalRanks& ranks_;
  const int world_size_;
  TensorArgs tensors_;
  Collective collective_;
  py::list copies_;
};

// The tensors of the local ranks for which is_one(rank) is true.
template <typename IsOne>
py::object tensors_of(const GivenTensors& given, IsOne&& is_one) {
  py::list found;
  const std::size_t n = given.num_tensors();
  for (int rank = 0; rank < given.num_ranks(); ++rank) {
    for (std::size_t i = 0; is_one(rank) && i < n; ++i) {
      append(found, given.at(static_cast<std::size_t>(rank) * n + i));
    }
  }
  return found;
}

// A copy, as bytes: a 16-bit float that is loaded as fp32 loses the payload of a NaN.
Buffers copy_of_bytes(void* const* source, void* const* destinations, int num_destinations,
                      std::size_t bytes) {
  return {source, destinations, 1, num_destinations, bytes, DType::kUInt8};
}

// A reduce-scatter reads wholes, of a chunk per rank, and writes chunks; an all-gather the reverse.
PreparedCollective prepare_chunks(py::handle outputs, py::handle inputs, const CallOptions& options,
                                  const LocalRanks& ranks) {
  const bool scatters = options.operation == Operation::kReduceScatter;
  GivenTensors out(outputs, options.name(), "outputs", ranks, false, true);
  GivenTensors in(inputs, options.name(), "inputs", ranks, false, true);
  out.adopt_arrays();
  in.adopt_arrays();
  const GivenTensors& all_wholes = scatters ? in : out;
  const GivenTensors& all_chunks = scatters ? out : in;
  Builder builder(options, ranks, ranks.world_size);
  const auto num = static_cast<std::size_t>(in.num_ranks());
  builder.reserve(2 * num);
  for (const GivenTensors* given : {&all_wholes, &all_chunks}) {
    for (std::size_t rank = 0; rank < num; ++rank) {
      builder.add(given->at(rank), given->name(rank), static_cast<int>(rank), given == &out);
    }
  }
  for (std::size_t rank = 0; rank < num; ++rank) {
    builder.tensors().check_agree(rank, 0);
    builder.tensors().check_agree(num + rank, num);
    builder.tensors().check_parts(rank, num + rank, ranks.world_size);
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
  if (ranks.is_one_of_processes) {
    collective.reserve_local(1);
    collective.add_local(scatters ? wholes[0] : chunks[0], scatters ? chunks[0] : wholes[0],
                         view.numel, view.dtype);
    return builder.finish(out.all(), in.all());
  }
  collective.bytes = view.bytes();
  if (view.numel == 0) return builder.finish(out.all(), in.all());
  builder.reserve_pointers(num * (num + 1));
  const auto push_all = [&](const std::vector<std::byte*>& pointers, std::size_t offset) {
    void* const* table = builder.table_end();
    for (std::size_t rank = 0; rank < num; ++rank) {
      builder.push(pointers[rank] + offset, static_cast<int>(rank));
    }
    return table;
  };
  const int k = ranks.world_size;
  if (collective.algorithm == Algorithm::kRing) {
    void* const* sources = push_all(scatters ? wholes : chunks, 0);
    void* const* destinations = push_all(scatters ? chunks : wholes, 0);
    collective.tensors.push_back({sources, destinations, k, k, view.numel, view.dtype,
                                  scatters ? RingPhases::kReduceScatter : RingPhases::kAllGather});
    return builder.finish(out.all(), in.all());
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
  return builder.finish(out.all(), in.all());
}

// An output may be the root's own input.
PreparedCollective prepare_reduce(py::handle output, py::handle inputs, const CallOptions& options,
                                  const LocalRanks& local) {
  const bool are_lists = is_coalesced(options.operation);
  const char* const argument = are_lists ? "outputs" : "output";
  GivenTensors ranks(inputs, options.name(), are_lists ? "lists" : "inputs", local, are_lists);
  ranks.adopt_arrays();
  const int k = ranks.num_ranks();
  const int root = options.root;
  const std::size_t n = ranks.num_tensors();
  // The outputs are those of one rank.
  const LocalRanks rank_of_outputs{k, root, true};
  if (are_lists) {
    read_list(output, options.name(), argument, static_cast<Py_ssize_t>(n),
              "tensor per parameter, as in lists[0]");
  }
  GivenTensors outputs(output, options.name(), argument, rank_of_outputs, are_lists, !are_lists);
  outputs.adopt_arrays();
  Builder builder(options, local, k);
  builder.add_all(ranks, [](int) { return false; });
  const auto first_output = static_cast<std::size_t>(k) * n;
  const auto first_own = static_cast<std::size_t>(root) * n;
  std::vector<bool> is_in_place;
  std::vector<bool> is_skipped(first_output);  // the root's inputs that are outputs
  for (std::size_t i = 0; i < n; ++i) {
    builder.add(outputs.at(i), outputs.name(i), root, true);
    builder.tensors().check_agree(first_output + i, i);
    is_in_place.push_back(builder.tensors().is_same(first_output + i, first_own + i));
    is_skipped[first_own + i] = is_in_place.back();
  }
  builder.tensors().check_disjoint(is_skipped);
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
  return builder.finish(outputs.all(), ranks.all());
}

PreparedCollective prepare_broadcast(py::handle tensors, const CallOptions& options,
                                     const LocalRanks& local) {
  const bool are_lists = is_coalesced(options.operation);
  GivenTensors ranks(tensors, options.name(), are_lists ? "lists" : "tensors", local, are_lists,
                     !are_lists);
  ranks.adopt_arrays();
  const int root = options.root - local.first_rank;  // among the local ranks
  const int k = ranks.num_ranks();
  const std::size_t n = ranks.num_tensors();
  const auto is_written = [root](int rank) { return rank != root; };
  Builder builder(options, local, local.is_one_of_processes ? local.world_size : k);
  // In place on some rank: refused on all ranks, or the others would wait for the root.
  const bool checks_all = local.is_one_of_processes;
  builder.add_all(ranks, [&](int rank) { return checks_all || is_written(rank); });
  builder.tensors().check_disjoint();
  py::object written = tensors_of(ranks, is_written);
  py::object read = tensors_of(ranks, [root](int rank) { return rank == root; });
  if (local.is_one_of_processes) {
    builder.collective().reserve_local(1);
    builder.add_in_place(0, is_written(0));
    return builder.finish(std::move(written), std::move(read));
  }
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
  return builder.finish(std::move(written), std::move(read));
}

}  // namespace

const char* operation_name(Operation operation) { return traits(operation).name; }
CallKind kind_of(Operation operation) { return traits(operation).kind; }
bool is_coalesced(Operation operation) { return traits(operation).is_coalesced; }

const char* CallOptions::name() const {
  if (!is_bound) return operation_name(operation);
  return is_coalesced(operation) ? "bind_coalesced" : "bind";
}

GivenTensors::GivenTensors(py::handle given, const char* operation, const char* argument,
                           const LocalRanks& ranks, bool are_lists, bool is_one)
    : operation_(operation), names_{argument} {
  if (ranks.is_one_of_processes) {
    names_.is_indexed = are_lists || (!is_one && is_sequence(given.ptr()));
    all_ = names_.is_indexed ? read_list(given, operation, argument, -1, "tensor per parameter")
                             : tuple_with(given.ptr());
    num_tensors_ = all_.size();
    return;
  }
  const Py_ssize_t expected = ranks.world_size == 0 ? -1 : ranks.world_size;
  all_ = read_list(given, operation, argument, expected,
                   are_lists ? "list per rank" : "tensor per rank");
  num_ranks_ = static_cast<int>(all_.size());
  if (num_ranks_ == 0) {
    fail(ErrorKind::kArgument, operation, ": ", argument,
         " is empty, expected at least one rank's tensor");
  }
  if (are_lists) read_lists();
}

// From a tuple of lists to one of tensors.
void GivenTensors::read_lists() {
  std::vector<py::tuple> lists;
  Py_ssize_t length = -1;
  for (int rank = 0; rank < num_ranks_; ++rank) {
    lists.push_back(read_list(at(static_cast<std::size_t>(rank)), operation_,
                              join(names_.argument, "[", rank, "]"), length,
                              "tensor per parameter, as in lists[0]"));
    length = PyTuple_GET_SIZE(lists.back().ptr());
  }
  num_tensors_ = static_cast<std::size_t>(length);
  names_.per_list = num_tensors_;
  auto flat = py::reinterpret_steal<py::tuple>(PyTuple_New(num_ranks_ * length));
  if (!flat) throw_python_error();
  Py_ssize_t next = 0;
  for (const py::tuple& list : lists) {
    for (Py_ssize_t i = 0; i < length; ++i) {
      PyObject* const tensor = PyTuple_GET_ITEM(list.ptr(), i);
      Py_INCREF(tensor);
      PyTuple_SET_ITEM(flat.ptr(), next++, tensor);
    }
  }
  all_ = std::move(flat);
}

void GivenTensors::adopt_arrays() {
  const std::size_t size = all_.size();
  std::size_t i = 0;
  while (i < size && is_plain_tensor(at(i))) ++i;
  if (i == size) return;
  auto adopted = py::reinterpret_steal<py::tuple>(PyTuple_New(static_cast<Py_ssize_t>(size)));
  if (!adopted) throw_python_error();
  for (i = 0; i < size; ++i) {
    PyTuple_SET_ITEM(adopted.ptr(), static_cast<Py_ssize_t>(i),
                     as_tensor(at(i), operation_, names_[i].text()).release().ptr());
  }
  all_ = std::move(adopted);
}

PreparedCollective prepare_all_reduce(GivenTensors& given, const CallOptions& options,
                                      const LocalRanks& ranks) {
  given.adopt_arrays();
  const int k = ranks.is_one_of_processes ? ranks.world_size : given.num_ranks();
  const std::size_t n = given.num_tensors();
  Builder builder(options, ranks, k);
  builder.add_all(given, [](int) { return true; });
  builder.tensors().check_disjoint();
  if (ranks.is_one_of_processes) {
    builder.collective().reserve_local(n);
    for (std::size_t i = 0; i < n; ++i) builder.add_in_place(i, true);
    return builder.finish(given.all());
  }
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
  return builder.finish(given.all());
}

PreparedCollective prepare(py::handle outputs, py::handle inputs, const CallOptions& options,
                           const LocalRanks& ranks) {
  const bool is_refused = ranks.is_one_of_processes
                              ? kind_of(options.operation) == CallKind::kReduce ||
                                    options.operation == Operation::kBroadcastCoalesced
                              : options.operation == Operation::kBarrier;
  if (is_refused) fail(ErrorKind::kUnsupported, options.name(), ": not a call of this group");
  switch (kind_of(options.operation)) {
    case CallKind::kAllReduce: {
      const bool are_lists = is_coalesced(options.operation);
      GivenTensors tensors(outputs, options.name(), are_lists ? "lists" : "tensors", ranks,
                           are_lists);
      return prepare_all_reduce(tensors, options, ranks);
    }
    case CallKind::kReduceScatter:
    case CallKind::kAllGather:
      return prepare_chunks(outputs, inputs, options, ranks);
    case CallKind::kBroadcast:
      return prepare_broadcast(outputs, options, ranks);
    case CallKind::kReduce:
      return prepare_reduce(outputs, inputs, options, ranks);
    case CallKind::kBarrier:
      break;
  }
  Builder barrier(options, ranks, ranks.world_size);
  return barrier.finish(py::list());
}

}  // namespace pyringar
