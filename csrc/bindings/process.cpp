// process: from the tensors of one rank to a ProcessCall, and the class ProcessGroup.
//
// Floor     bindings
// Tests     tests/test_processes.py

#include "bindings/process.h"

#include <algorithm>
#include <cstring>

#include "bindings/convert.h"
#include "bindings/tensor.h"
#include "core/error.h"
#include "cpu/process_group.h"

namespace pyringar {

namespace {

constexpr const char* kAlgorithms[] = {"direct", "ring"};
const char* wish_name(int wish) { return kAlgorithms[wish]; }

// A communicator that was made before fork() is the parent's: its thread is not in the child.
struct GroupDeleter {
  void operator()(ProcessGroup* group) const {
    if (group->forked()) return;
    const py::gil_scoped_release release;
    delete group;
  }
};
using GroupPtr = std::shared_ptr<ProcessGroup>;

std::chrono::nanoseconds to_nanoseconds(double seconds) {
  return std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(seconds, 1e9) * 1e9));
}

SegmentToken parse_token(const py::bytes& token) {
  const std::string_view text = token;
  if (text.size() != kTokenBytes) {
    fail(ErrorKind::kArgument, "token has ", text.size(), " bytes, expected ", kTokenBytes);
  }
  SegmentToken parsed;
  std::memcpy(parsed.data(), text.data(), kTokenBytes);
  return parsed;
}

// Reads and checks the tensors of one call.
class CallBuilder {
 public:
  CallBuilder(CallKind kind, const char* operation) : operation_(operation), grad_(operation) {
    prepared_.call.kind = kind;
  }

  struct Prepared {
    ProcessCall call;
    py::list written;
    py::list read;
  };

  // in place: an output that is its own input.
  void add_in_place(py::handle given, Place place, bool is_read_only = false) {
    const TensorView view = read(given, place, !is_read_only);
    const TensorSpan span = dense(view, true, !is_read_only, false);
    prepared_.call.outputs.push_back(span);
  }
  void add_input(py::handle given, Place place) {
    prepared_.call.inputs.push_back(dense(read(given, place, false), true, false, true));
  }
  void add_output(py::handle given, Place place) {
    prepared_.call.outputs.push_back(dense(read(given, place, true), false, true, true));
  }

  void set_op(ReduceOp op, int world_size) {
    prepared_.call.op = op == ReduceOp::kMean ? ReduceOp::kSum : op;
    prepared_.call.divisor = op == ReduceOp::kMean ? world_size : 1;
  }
  ProcessCall& call() { return prepared_.call; }

  // whole holds a part per rank.
  void check_parts(std::size_t whole, std::size_t part, int world_size) const {
    const TensorView& w = views_[whole];
    const TensorView& p = views_[part];
    if (w.dtype != p.dtype || w.numel != p.numel * static_cast<std::size_t>(world_size)) {
      fail(ErrorKind::kArgument, operation_, ": ", places_[whole].text(), " has ", w.numel, " ",
           dtype_name(w.dtype), " elements and ", places_[part].text(), " has ", p.numel, " ",
           dtype_name(p.dtype), "; expected one dtype and ", world_size,
           " times as many, one part per rank");
    }
  }

  Prepared finish() {
    check_disjoint(views_, places_, operation_);
    return std::move(prepared_);
  }

 private:
  TensorView read(py::handle given, Place place, bool is_written) {
    const py::object tensor = is_plain_tensor(given.ptr())
                                  ? py::reinterpret_borrow<py::object>(given)
                                  : as_tensor(given.ptr());
    const TensorView view = read_tensor(tensor.ptr(), operation_, place);
    if (view.device != kHostDevice) {
      fail(ErrorKind::kArgument, operation_, ": ", place.text(), " is on ",
           device_name(view.device), ", expected cpu, this rank's device");
    }
    if (is_written) grad_.check(tensor.ptr(), place);
    (is_written ? prepared_.written : prepared_.read).append(tensor);
    views_.push_back(view);
    places_.push_back(place);
    return view;
  }

  // Elements side by side: the tensor's own, or a packed copy. Those in another order than that of
  // their index must be so on all ranks.
  TensorSpan dense(const TensorView& view, bool is_input, bool is_output, bool is_flat) {
    const bool is_contiguous = has_index_order(view);
    if (!is_flat) mix_sizes(view);
    if (view.is_dense && (!is_flat || is_contiguous)) {
      if (!is_contiguous) mix_strides(view);
      return {view.data, view.numel, view.dtype};
    }
    auto memory = std::make_unique_for_overwrite<std::byte[]>(view.bytes());
    std::byte* data = memory.get();
    prepared_.call.staged.push_back({view.strided(), std::move(memory), is_input, is_output});
    return {data, view.numel, view.dtype};
  }

  static bool has_index_order(const TensorView& view) {
    std::int64_t expected = 1;
    for (int dim = view.ndim - 1; dim >= 0; --dim) {
      if (view.shape[dim] == 1) continue;
      if (view.strides[dim] != expected) return view.numel <= 1;
      expected *= view.shape[dim];
    }
    return true;
  }

  // What ranks compare; not where only the order of elements counts.
  void mix_sizes(const TensorView& view) {
    std::uint64_t& digest = prepared_.call.layouts;
    digest = mix(digest, static_cast<std::uint64_t>(view.ndim));
    for (int dim = 0; dim < view.ndim; ++dim) {
      digest = mix(digest, static_cast<std::uint64_t>(view.shape[dim]));
    }
  }

  void mix_strides(const TensorView& view) {
    std::uint64_t& digest = prepared_.call.layouts;
    digest = mix(digest, views_.size());
    for (int dim = 0; dim < view.ndim; ++dim) {
      if (view.shape[dim] == 1) continue;  // its stride means nothing
      digest = mix(digest, static_cast<std::uint64_t>(view.strides[dim]));
    }
  }

  const char* operation_;
  GradGuard grad_;
  Prepared prepared_;
  std::vector<TensorView> views_;
  std::vector<Place> places_;
};

using Prepared = CallBuilder::Prepared;

bool parse_ring(py::handle algorithm) {
  if (algorithm.is_none()) return false;
  return parse<int>(algorithm, "algorithm", &wish_name, 2) == 1;
}

// A tensor, or a list or tuple of tensors.
Prepared prepare_all_reduce(ProcessGroup& group, py::handle tensors, py::handle op,
                            py::handle algorithm, const char* operation) {
  CallBuilder builder(CallKind::kAllReduce, operation);
  builder.set_op(parse_op(op), group.world_size());
  builder.call().wants_ring = parse_ring(algorithm);
  if (PyList_Check(tensors.ptr()) || PyTuple_Check(tensors.ptr())) {
    // A tuple of its own: a list could change while we look.
    const auto items = py::reinterpret_steal<py::tuple>(PySequence_Tuple(tensors.ptr()));
    if (!items) throw_python_error();
    for (int i = 0; i < static_cast<int>(items.size()); ++i) {
      builder.add_in_place(PyTuple_GET_ITEM(items.ptr(), i), {"tensors", i});
    }
  } else {
    builder.add_in_place(tensors, {"tensor"});
  }
  Prepared prepared = builder.finish();
  group.find_registered(prepared.call);
  return prepared;
}

Prepared prepare_reduce_scatter(ProcessGroup& group, py::handle output, py::handle input,
                                py::handle op) {
  CallBuilder builder(CallKind::kReduceScatter, "reduce_scatter");
  builder.set_op(parse_op(op), group.world_size());
  builder.add_input(input, {"input"});
  builder.add_output(output, {"output"});
  builder.check_parts(0, 1, group.world_size());
  return builder.finish();
}

Prepared prepare_all_gather(ProcessGroup& group, py::handle output, py::handle input) {
  CallBuilder builder(CallKind::kAllGather, "all_gather");
  builder.add_input(input, {"input"});
  builder.add_output(output, {"output"});
  builder.check_parts(1, 0, group.world_size());
  return builder.finish();
}

Prepared prepare_broadcast(ProcessGroup& group, py::handle tensor, int root) {
  if (root < 0 || root >= group.world_size()) {
    fail(ErrorKind::kArgument, "broadcast: root is ", root, ", expected a rank from 0 to ",
         group.world_size() - 1);
  }
  CallBuilder builder(CallKind::kBroadcast, "broadcast");
  builder.call().root = root;
  builder.add_in_place(tensor, {"tensor"}, group.rank() == root);
  builder.call().inputs = builder.call().outputs;
  return builder.finish();
}

// Whether this thread came from Python, and may look at Python's signals.
thread_local bool is_python_call = false;

void look_at_signals() {
  if (!is_python_call) return;
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw PythonErrorPending{};
}

void run(ProcessGroup& group, const ProcessCall& call) {
  const py::gil_scoped_release release;
  is_python_call = true;
  try {
    while (!group.wait_for_turn(kSignalInterval)) look_at_signals();
    group.run(call);
  } catch (...) {
    is_python_call = false;
    throw;
  }
  is_python_call = false;
}

py::object run_or_submit(const GroupPtr& group, Prepared prepared, bool async_op) {
  group->check_usable();
  mark_written(prepared.written.ptr());
  if (async_op) {
    auto work = group->submit(std::move(prepared.call));
    return py::make_tuple(py::cast(work), prepared.written, prepared.read);
  }
  run(*group, prepared.call);
  return py::none();
}

// A call that was checked once; see the one of bindings/module.cpp.
struct BoundCall {
  GroupPtr group;
  Prepared prepared;
  py::list storages;

  BoundCall(GroupPtr g, Prepared p) : group(std::move(g)), prepared(std::move(p)) {
    for (const py::handle tensor : prepared.written) {
      storages.append(tensor.attr("untyped_storage")());
    }
  }
};

constexpr const char* kBoundCapsule = "pyringar.bound_process_call";

PyObject* call_bound(PyObject* capsule, PyObject*) {
  try {
    auto* bound = static_cast<BoundCall*>(PyCapsule_GetPointer(capsule, kBoundCapsule));
    mark_written(bound->prepared.written.ptr());
    run(*bound->group, bound->prepared.call);
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
  Py_RETURN_NONE;
}

py::object make_bound(GroupPtr group, Prepared prepared) {
  static PyMethodDef method = {"bound_all_reduce", &call_bound, METH_NOARGS,
                               "Reduce the bound tensors in place."};
  auto bound = std::make_unique<BoundCall>(std::move(group), std::move(prepared));
  const py::capsule capsule(bound.release(), kBoundCapsule, [](PyObject* c) {
    delete static_cast<BoundCall*>(PyCapsule_GetPointer(c, kBoundCapsule));
  });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
}

py::dict stats_dict(ProcessGroup& group) {
  const ProcessStats stats = [&] {
    const py::gil_scoped_release release;
    return group.stats();
  }();
  py::dict by_algorithm;
  for (int i = 0; i < kNumProcessAlgorithms; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (stats.calls[at] == 0) continue;
    py::dict row;
    row["calls"] = stats.calls[at];
    row["bytes"] = stats.bytes[at];
    row["busy_s"] = static_cast<double>(stats.busy_ns[at]) * 1e-9;
    by_algorithm[process_algorithm_name(static_cast<ProcessAlgorithm>(i))] = row;
  }
  return by_algorithm;
}

GroupPtr make_group(SharedMemory& memory, int rank, int world_size, const py::bytes& token,
                    double timeout_s, bool checks_digests) {
  const Segment segment =
      Segment::attach(memory.data(), memory.bytes(), world_size, parse_token(token));
  const ProcessGroupOptions options{to_nanoseconds(timeout_s), checks_digests};
  GroupPtr group(new ProcessGroup(std::move(memory), segment, rank, options), GroupDeleter{});
  group->set_on_nap(&look_at_signals);
  return group;
}

// bases[r]: (process id, descriptor, address) of rank r's memory; own memory is not mapped again.
void add_region(ProcessGroup& group, std::uint64_t id, const py::list& descriptors,
                const SharedMemory& own) {
  std::vector<SharedMemory> mapped;
  std::vector<std::byte*> bases;
  for (int rank = 0; rank < group.world_size(); ++rank) {
    if (rank == group.rank()) {
      bases.push_back(own.data());
      continue;
    }
    const auto [pid, fd] = descriptors[static_cast<std::size_t>(rank)].cast<std::pair<int, int>>();
    mapped.push_back(SharedMemory::open(pid, fd, own.bytes(), "registered tensors"));
    bases.push_back(mapped.back().data());
  }
  group.add_region(id, std::move(mapped), std::move(bases), own.bytes());
}

void bind_shared_memory(py::module_& m) {
  py::class_<SharedMemory>(m, "SharedMemory", py::buffer_protocol())
      .def(py::init([](std::size_t bytes, const char* purpose) {
             return SharedMemory::create(bytes, purpose);
           }),
           py::arg("nbytes"), py::arg("purpose"))
      .def_buffer([](SharedMemory& memory) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(memory.data()),
                               static_cast<py::ssize_t>(memory.bytes()));
      })
      .def_property_readonly("nbytes", &SharedMemory::bytes)
      .def_property_readonly("fd", &SharedMemory::fd)
      .def_property_readonly("address", [](const SharedMemory& memory) {
        return reinterpret_cast<std::uintptr_t>(memory.data());
      });
  m.def("create_segment", [](int world_size, const py::bytes& token) {
    SharedMemory memory =
        SharedMemory::create(Segment::bytes_for(world_size), "a group of processes");
    Segment::lay_out(memory.data(), world_size, parse_token(token));
    return memory;
  });
  m.def("open_segment", [](std::int32_t pid, int fd, int world_size) {
    return SharedMemory::open(pid, fd, Segment::bytes_for(world_size), "a group of processes");
  });
  m.def("process_id", [] {
    const ProcessId self = this_process();
    return py::make_tuple(self.pid, self.start_ticks);
  });
  m.def("is_alive",
        [](std::int32_t pid, std::uint64_t start_ticks) { return is_alive({pid, start_ticks}); });
}

}  // namespace

void bind_process_group(py::module_& m) {
  bind_shared_memory(m);
  py::class_<ProcessGroup, GroupPtr>(m, "ProcessGroup")
      .def(py::init(&make_group), py::arg("memory"), py::arg("rank"), py::arg("world_size"),
           py::arg("token"), py::arg("timeout_s"), py::arg("checks_digests"))
      .def("absent_ranks",
           [](const ProcessGroup& group) {
             py::list absent;
             for (const int rank : group.absent_ranks()) absent.append(rank);
             return absent;
           })
      .def("seal", &ProcessGroup::seal)
      .def("all_reduce",
           [](const GroupPtr& group, py::handle tensors, py::handle op, py::handle algorithm,
              bool async_op) {
             return run_or_submit(
                 group, prepare_all_reduce(*group, tensors, op, algorithm, "all_reduce"), async_op);
           })
      .def("reduce_scatter",
           [](const GroupPtr& group, py::handle output, py::handle input, py::handle op,
              bool async_op) {
             return run_or_submit(group, prepare_reduce_scatter(*group, output, input, op),
                                  async_op);
           })
      .def("all_gather",
           [](const GroupPtr& group, py::handle output, py::handle input, bool async_op) {
             return run_or_submit(group, prepare_all_gather(*group, output, input), async_op);
           })
      .def("broadcast",
           [](const GroupPtr& group, py::handle tensor, int root, bool async_op) {
             return run_or_submit(group, prepare_broadcast(*group, tensor, root), async_op);
           })
      .def("barrier",
           [](const GroupPtr& group, bool async_op) {
             return run_or_submit(group, CallBuilder(CallKind::kBarrier, "barrier").finish(),
                                  async_op);
           })
      .def("bind",
           [](const GroupPtr& group, py::handle tensors, py::handle op, py::handle algorithm) {
             group->check_usable();
             return make_bound(group, prepare_all_reduce(*group, tensors, op, algorithm, "bind"));
           })
      .def("add_region", &add_region)
      .def("remove_region", &ProcessGroup::remove_region, py::call_guard<py::gil_scoped_release>())
      .def("close", &ProcessGroup::close, py::call_guard<py::gil_scoped_release>())
      .def("stats", &stats_dict)
      .def("delay",
           [](ProcessGroup& group, py::handle phase, double seconds) {
             const auto parsed = parse<Phase>(phase, "phase", &phase_name, kNumPhases);
             const py::gil_scoped_release release;
             group.delay(parsed, to_nanoseconds(seconds));
           })
      .def("flip_bit_of_next", &ProcessGroup::flip_bit_of_next,
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace pyringar
