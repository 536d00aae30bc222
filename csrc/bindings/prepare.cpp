// prepare: one function per kind of call checks the tensors and makes the Collective.
#include "bindings/prepare.h"

#include "bindings/builder.h"

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

// Copy a list to a tuple and check its length. expected < 0 allows any length.
py::tuple read_list(py::handle given, const char* operation, const std::string& argument,
                    Py_ssize_t expected, const char* per) {
  if (!is_sequence(given.ptr())) {
    fail(ErrorKind::kArgument, operation, ": ", argument, " is ", type_text(given.ptr()),
         ", expected a list or tuple with one ", per);
  }
  // PySequence_Tuple copies a list, which could change while the GIL is released.
  auto items = py::reinterpret_steal<py::tuple>(PySequence_Tuple(given.ptr()));
  if (!items) throw py::error_already_set();
  const Py_ssize_t size = PyTuple_GET_SIZE(items.ptr());
  if (expected >= 0 && size != expected) {
    fail(ErrorKind::kArgument, operation, ": ", argument, " has ", size,
         size == 1 ? " entry" : " entries", ", expected ", expected, ", one ", per);
  }
  return items;
}

template <typename IsOne>
py::object tensors_of(const GivenTensors& given, IsOne&& is_one) {
  py::list found;
  const std::size_t n = given.num_tensors();
  for (int rank = 0; rank < given.num_ranks(); ++rank) {
    for (std::size_t i = 0; is_one(rank) && i < n; ++i) {
      found.append(py::handle(given.at(static_cast<std::size_t>(rank) * n + i)));
    }
  }
  return found;
}

// Copy as bytes: a reduction kernel would widen 16-bit floats to fp32 and lose NaN payloads.
Buffers copy_of_bytes(void* const* source, void* const* destinations, int num_destinations,
                      std::size_t bytes) {
  return {source, destinations, 1, num_destinations, bytes, DType::kUInt8};
}

// wholes: one full tensor per rank. chunks: one chunk per rank. A reduce-scatter reads wholes and
// writes chunks; an all-gather reads chunks and writes wholes.
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
    builder.check_agree(rank, 0);
    builder.check_agree(num + rank, num);
    builder.check_parts(rank, num + rank);
  }
  builder.check_disjoint();
  std::vector<std::byte*> wholes;
  std::vector<std::byte*> chunks;
  for (std::size_t rank = 0; rank < num; ++rank) {
    wholes.push_back(builder.memory(rank, scatters, !scatters, true));
    chunks.push_back(builder.memory(num + rank, !scatters, scatters, true));
  }
  const TensorView& view = builder[0];
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

PreparedCollective prepare_reduce(py::handle output, py::handle inputs, const CallOptions& options,
                                  const LocalRanks& local) {
  const bool are_lists = is_coalesced(options.operation);
  const char* const argument = are_lists ? "outputs" : "output";
  GivenTensors ranks(inputs, options.name(), are_lists ? "lists" : "inputs", local, are_lists);
  ranks.adopt_arrays();
  const int k = ranks.num_ranks();
  const int root = options.root;
  const std::size_t n = ranks.num_tensors();
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
  std::vector<bool> is_skipped(first_output);  // inputs of the root that are also outputs
  for (std::size_t i = 0; i < n; ++i) {
    builder.add(outputs.at(i), outputs.name(i), root, true);
    builder.check_agree(first_output + i, i);
    is_in_place.push_back(builder.is_same(first_output + i, first_own + i));
    is_skipped[first_own + i] = is_in_place.back();
  }
  builder.check_disjoint(is_skipped);
  builder.reserve_pointers(first_output + n);
  for (std::size_t i = 0; i < n; ++i) {
    const bool in_place = is_in_place[i];
    const bool is_flat = !builder.all_same_layout(i, n);
    void* const* sources = builder.table_end();
    for (int rank = 0; rank < k; ++rank) {
      const std::size_t at = static_cast<std::size_t>(rank) * n + i;
      builder.push(builder.memory(at, true, in_place && rank == root, is_flat), rank);
    }
    void* const* destination = builder.table_end();
    builder.push(in_place ? sources[root] : builder.memory(first_output + i, false, true, is_flat),
                 root);
    const TensorView& view = builder[i];
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
  const int root = options.root - local.first_rank;  // index of the root among the local ranks
  const int k = ranks.num_ranks();
  const std::size_t n = ranks.num_tensors();
  const auto is_written = [root](int rank) { return rank != root; };
  Builder builder(options, local, local.is_one_of_processes ? local.world_size : k);
  // In processes, check requires_grad on the root too. If only the other ranks raised, the root
  // would wait for them.
  const bool checks_all = local.is_one_of_processes;
  builder.add_all(ranks, [&](int rank) { return checks_all || is_written(rank); });
  builder.check_disjoint();
  py::object written = tensors_of(ranks, is_written);
  py::object read = tensors_of(ranks, [root](int rank) { return rank == root; });
  if (local.is_one_of_processes) {
    builder.collective().reserve_local(1);
    builder.add_in_place(0, is_written(0));
    return builder.finish(std::move(written), std::move(read));
  }
  builder.reserve_pointers(static_cast<std::size_t>(k) * n);
  for (std::size_t i = 0; i < n; ++i) {
    const bool is_flat = !builder.all_same_layout(i, n);
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
    const TensorView& view = builder[i];
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
                             : py::reinterpret_steal<py::tuple>(PyTuple_Pack(1, given.ptr()));
    if (!all_) throw py::error_already_set();
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
  py::tuple flat(num_ranks_ * length);
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
  py::tuple adopted(size);
  for (i = 0; i < size; ++i) {
    PyTuple_SET_ITEM(adopted.ptr(), static_cast<Py_ssize_t>(i),
                     as_tensor(at(i), operation_, names_[i].text()).release().ptr());
  }
  all_ = std::move(adopted);
}

GivenTensors given_tensors(py::handle given, const CallOptions& options, const LocalRanks& ranks) {
  const bool are_lists = is_coalesced(options.operation);
  return {given, options.name(), are_lists ? "lists" : "tensors", ranks, are_lists};
}

PreparedCollective prepare_all_reduce(GivenTensors& given, const CallOptions& options,
                                      const LocalRanks& ranks) {
  given.adopt_arrays();
  const int k = ranks.is_one_of_processes ? ranks.world_size : given.num_ranks();
  const std::size_t n = given.num_tensors();
  Builder builder(options, ranks, k);
  builder.add_all(given, [](int) { return true; });
  builder.check_disjoint();
  if (ranks.is_one_of_processes) {
    builder.collective().reserve_local(n);
    for (std::size_t i = 0; i < n; ++i) builder.add_in_place(i, true);
    return builder.finish(given.all());
  }
  builder.reserve_pointers(n * static_cast<std::size_t>(k));
  for (std::size_t i = 0; i < n; ++i) {
    const bool is_flat = !builder.all_same_layout(i, n);
    void* const* table = builder.table_end();
    for (int rank = 0; rank < k; ++rank) {
      const std::size_t at = static_cast<std::size_t>(rank) * n + i;
      builder.push(builder.memory(at, true, true, is_flat), rank);
    }
    const TensorView& view = builder[i];
    builder.collective().bytes += view.bytes();
    if (k == 1 || view.numel == 0) continue;  // the sum over one rank is its tensor
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
      GivenTensors tensors = given_tensors(outputs, options, ranks);
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
