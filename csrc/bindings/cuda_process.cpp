// cuda_process: from the tensors of one rank to a ProcessCall on its GPU, and the class
// ProcessGroup.
//
// Floor     bindings
// Tests     tests/test_cuda_processes.py

#include "bindings/cuda_process.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "bindings/convert.h"
#include "bindings/cuda_process_group.h"
#include "bindings/tensor.h"
#include "core/error.h"

namespace pyringar {

namespace {

namespace py = pybind11;

// A communicator that was made before fork() is the parent's: its thread is not in the child, and
// no CUDA either.
struct GroupDeleter {
  void operator()(CudaProcessGroup* group) const {
    if (group->host().forked()) return;
    const py::gil_scoped_release release;
    delete group;
  }
};
using GroupPtr = std::shared_ptr<CudaProcessGroup>;

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

// A call, and the tensors that it must keep.
struct Prepared {
  ProcessCall call;
  py::list written;
  py::list read;
  py::list copies;  // (tensor, its dense copy), for those that are written
};

// Reads and checks the tensors of one call. Dense copies are torch's, on the current stream, and
// made when all checks have passed.
class CallBuilder {
 public:
  CallBuilder(const CudaProcessGroup& group, CallKind kind, const char* operation)
      : device_(group.device()), operation_(operation), grad_(operation) {
    call_.kind = kind;
  }

  ProcessCall& call() { return call_; }
  void set_op(ReduceOp op, int world_size) {
    call_.op = op == ReduceOp::kMean ? ReduceOp::kSum : op;
    call_.divisor = op == ReduceOp::kMean ? world_size : 1;
  }

  // in place: an output that is its own input.
  void add_in_place(py::handle given, Place place, bool is_read_only = false) {
    add(given, place, !is_read_only, /*is_flat=*/false);
  }
  void add_input(py::handle given, Place place) { add(given, place, false, /*is_flat=*/true); }
  void add_output(py::handle given, Place place) { add(given, place, true, /*is_flat=*/true); }

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
    Prepared prepared;
    for (std::size_t i = 0; i < views_.size(); ++i) {
      const Argument& argument = arguments_[i];
      const TensorSpan span = dense(i, prepared);
      (argument.is_written ? prepared.written : prepared.read).append(argument.tensor);
      const bool is_output = argument.is_written || !argument.is_flat;
      (is_output ? call_.outputs : call_.inputs).push_back(span);
    }
    if (call_.kind == CallKind::kBroadcast) call_.inputs = call_.outputs;
    prepared.call = std::move(call_);
    return prepared;
  }

 private:
  struct Argument {
    py::object tensor;
    bool is_written;
    bool is_flat;  // only the order of elements counts, not the shape
  };

  void add(py::handle given, Place place, bool is_written, bool is_flat) {
    py::object tensor = is_plain_tensor(given.ptr()) ? py::reinterpret_borrow<py::object>(given)
                                                     : as_tensor(given.ptr());
    const TensorView view = read_tensor(tensor.ptr(), operation_, place);
    if (view.device != device_) {
      fail(ErrorKind::kArgument, operation_, ": ", place.text(), " is on ",
           device_name(view.device), ", expected ", device_name(device_), ", this rank's device");
    }
    if (is_written) grad_.check(tensor.ptr(), place);
    views_.push_back(view);
    places_.push_back(place);
    arguments_.push_back({std::move(tensor), is_written, is_flat});
  }

  // Elements side by side: the tensor's own, or a copy of it. Those in another order than that of
  // their index must be so on all ranks.
  TensorSpan dense(std::size_t i, Prepared& prepared) {
    const TensorView& view = views_[i];
    const Argument& argument = arguments_[i];
    const bool is_contiguous = has_index_order(view);
    if (!argument.is_flat) mix_sizes(view);
    if (view.is_dense && (!argument.is_flat || is_contiguous)) {
      if (!is_contiguous) mix_strides(view, i);
      return {view.data, view.numel, view.dtype};
    }
    py::object copy = contiguous(argument.tensor.attr("detach")().ptr());
    const TensorView copied = read_tensor(copy.ptr(), operation_, places_[i]);
    if (argument.is_written) {
      prepared.copies.append(py::make_tuple(argument.tensor, copy));
    } else {
      prepared.read.append(copy);
    }
    return {copied.data, copied.numel, copied.dtype};
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
    std::uint64_t& digest = call_.layouts;
    digest = mix(digest, static_cast<std::uint64_t>(view.ndim));
    for (int dim = 0; dim < view.ndim; ++dim) {
      digest = mix(digest, static_cast<std::uint64_t>(view.shape[dim]));
    }
  }
  void mix_strides(const TensorView& view, std::size_t index) {
    std::uint64_t& digest = call_.layouts;
    digest = mix(digest, index + 1);
    for (int dim = 0; dim < view.ndim; ++dim) {
      if (view.shape[dim] == 1) continue;  // its stride means nothing
      digest = mix(digest, static_cast<std::uint64_t>(view.strides[dim]));
    }
  }

  const int device_;
  const char* operation_;
  GradGuard grad_;
  ProcessCall call_;
  std::vector<TensorView> views_;
  std::vector<Place> places_;
  std::vector<Argument> arguments_;
};

void check_no_ring(py::handle algorithm, const char* operation) {
  const bool is_ring = PyUnicode_Check(algorithm.ptr()) && algorithm.cast<std::string>() == "ring";
  if (is_ring) {
    fail(ErrorKind::kUnsupported, operation,
         ": algorithm is 'ring', expected 'auto' or 'direct': "
         "ranks in processes of their own have no ring on GPUs");
  }
}

// A tensor, or a list or tuple of tensors.
Prepared prepare_all_reduce(CudaProcessGroup& group, py::handle tensors, py::handle op,
                            py::handle algorithm, const char* operation) {
  check_no_ring(algorithm, operation);
  CallBuilder builder(group, CallKind::kAllReduce, operation);
  builder.set_op(parse_op(op), group.host().world_size());
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
  return builder.finish();
}

Prepared prepare_reduce_scatter(CudaProcessGroup& group, py::handle output, py::handle input,
                                py::handle op) {
  CallBuilder builder(group, CallKind::kReduceScatter, "reduce_scatter");
  builder.set_op(parse_op(op), group.host().world_size());
  builder.add_input(input, {"input"});
  builder.add_output(output, {"output"});
  builder.check_parts(0, 1, group.host().world_size());
  return builder.finish();
}

Prepared prepare_all_gather(CudaProcessGroup& group, py::handle output, py::handle input) {
  CallBuilder builder(group, CallKind::kAllGather, "all_gather");
  builder.add_input(input, {"input"});
  builder.add_output(output, {"output"});
  builder.check_parts(1, 0, group.host().world_size());
  return builder.finish();
}

Prepared prepare_broadcast(CudaProcessGroup& group, py::handle tensor, int root) {
  if (root < 0 || root >= group.host().world_size()) {
    fail(ErrorKind::kArgument, "broadcast: root is ", root, ", expected a rank from 0 to ",
         group.host().world_size() - 1);
  }
  CallBuilder builder(group, CallKind::kBroadcast, "broadcast");
  builder.call().root = root;
  builder.add_in_place(tensor, {"tensor"}, group.host().rank() == root);
  return builder.finish();
}

// -- running --------------------------------------------------------------------------------------

// Whether this thread came from Python, and may look at Python's signals.
thread_local bool is_python_call = false;

void look_at_signals() {
  if (!is_python_call) return;
  const py::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw PythonErrorPending{};
}

class PythonCall {
 public:
  PythonCall() { is_python_call = true; }
  ~PythonCall() { is_python_call = false; }
  PythonCall(const PythonCall&) = delete;
  PythonCall& operator=(const PythonCall&) = delete;

 private:
  const py::gil_scoped_release release_;
};

cudaStream_t stream_of(const CudaProcessGroup& group) {
  return static_cast<cudaStream_t>(current_stream(group.device()));
}

void run(CudaProcessGroup& group, const ProcessCall& call) {
  const cudaStream_t stream = stream_of(group);
  const PythonCall python_call;
  while (!group.host().wait_for_turn(kSignalInterval)) look_at_signals();
  group.run(call, stream);
}

// A call that is under way on the communicator's own stream, or will be.
class CudaProcessWork {
 public:
  // enqueued: none, if it is already.
  CudaProcessWork(GroupPtr group, CudaProcessGroup::Submitted submitted)
      : group_(std::move(group)), submitted_(std::move(submitted)) {}

  // While a stream is captured nobody may ask an event: not yet, then.
  bool is_completed() {
    if (submitted_.enqueued != nullptr && !submitted_.enqueued->is_completed()) return false;
    return !cuda::is_capturing(stream_of(*group_), group_->device()) && submitted_.done->is_done();
  }
  // Orders the current stream after it; the host waits until it is enqueued.
  bool wait(double timeout_s) {
    if (submitted_.enqueued != nullptr && !wait_until_enqueued(timeout_s)) return false;
    submitted_.done->make_wait(stream_of(*group_), group_->device());
    return true;
  }
  py::object exception() {
    const std::exception_ptr error =
        submitted_.enqueued != nullptr ? submitted_.enqueued->exception() : nullptr;
    if (!error) return py::none();
    set_python_error(error);
    const py::error_already_set raised;
    return py::reinterpret_borrow<py::object>(raised.value());
  }

 private:
  bool wait_until_enqueued(double timeout_s) {
    const PythonCall python_call;
    const auto deadline = Clock::now() + to_nanoseconds(timeout_s);
    while (true) {
      const std::chrono::nanoseconds left = deadline - Clock::now();
      if (submitted_.enqueued->wait(std::min<std::chrono::nanoseconds>(left, kSignalInterval))) {
        return true;
      }
      if (left <= kSignalInterval) return false;
      look_at_signals();
    }
  }

  const GroupPtr group_;
  const CudaProcessGroup::Submitted submitted_;
};

void copy_back(const Prepared& prepared) {
  for (const py::handle pair : prepared.copies) {
    const auto both = py::reinterpret_borrow<py::tuple>(pair);
    both[0].attr("detach")().attr("copy_")(both[1]);
  }
}

py::object run_or_submit(const GroupPtr& group, Prepared prepared, bool async_op) {
  group->host().check_usable();
  mark_written(prepared.written.ptr());
  if (async_op && py::len(prepared.copies) == 0) {
    const cudaStream_t stream = stream_of(*group);
    auto submitted = group->submit(std::move(prepared.call), stream);
    auto work = std::make_shared<CudaProcessWork>(group, std::move(submitted));
    return py::make_tuple(py::cast(work), prepared.written, prepared.read);
  }
  run(*group, prepared.call);
  copy_back(prepared);
  if (!async_op) return py::none();
  // The copies back are torch's, on the current stream: there the work ends.
  auto done = std::make_shared<cuda::Event>(group->device());
  done->record(stream_of(*group));
  auto work = std::make_shared<CudaProcessWork>(
      group, CudaProcessGroup::Submitted{nullptr, std::move(done)});
  return py::make_tuple(py::cast(work), prepared.written, prepared.copies);
}

// A call that was checked once; its tensors and their storages stay alive with it.
py::object make_bound(const GroupPtr& group, Prepared prepared) {
  if (py::len(prepared.copies) > 0) {
    fail(ErrorKind::kUnsupported,
         "bind: tensors with gaps between their elements cannot be bound; pass .contiguous() ones");
  }
  py::list storages;
  for (const py::handle tensor : prepared.written) {
    storages.append(tensor.attr("untyped_storage")());
  }
  auto call = std::make_shared<const ProcessCall>(std::move(prepared.call));
  return py::cpp_function([group, call, written = prepared.written, storages] {
    mark_written(written.ptr());
    run(*group, *call);
  });
}

py::dict stats_dict(CudaProcessGroup& group) {
  const ProcessStats stats = group.stats();
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
                    double timeout_s, bool checks_digests, int device) {
  const Segment segment =
      Segment::attach(memory.data(), memory.bytes(), world_size, parse_token(token));
  const CudaProcessOptions options{to_nanoseconds(timeout_s), checks_digests};
  GroupPtr group(new CudaProcessGroup(std::move(memory), segment, rank, device, options),
                 GroupDeleter{});
  group->host().set_on_nap(&look_at_signals);
  return group;
}

// This module's own: the CPU engine's may have been made by another compiler.
void bind_segment(py::module_& m) {
  py::class_<SharedMemory>(m, "SharedMemory", py::module_local())
      .def_property_readonly("fd", &SharedMemory::fd);
  m.def("create_segment", [](int world_size, const py::bytes& token) {
    SharedMemory memory =
        SharedMemory::create(Segment::bytes_for(world_size), "a group of processes");
    Segment::lay_out(memory.data(), world_size, parse_token(token));
    return memory;
  });
  m.def("open_segment", [](std::int32_t pid, int fd, int world_size) {
    return SharedMemory::open(pid, fd, Segment::bytes_for(world_size), "a group of processes");
  });
}

}  // namespace

void bind_cuda_process_group(py::module_& m) {
  bind_segment(m);
  py::class_<CudaProcessWork, std::shared_ptr<CudaProcessWork>>(m, "ProcessWork")
      .def("is_completed", &CudaProcessWork::is_completed)
      .def("exception", &CudaProcessWork::exception)
      .def("finished_ns", [](CudaProcessWork&) { return 0; })  // nobody waits for it on the host
      .def("wait", &CudaProcessWork::wait);
  py::class_<CudaProcessGroup, GroupPtr>(m, "ProcessGroup")
      .def(py::init(&make_group), py::arg("memory"), py::arg("rank"), py::arg("world_size"),
           py::arg("token"), py::arg("timeout_s"), py::arg("checks_digests"), py::arg("device"))
      .def("absent_ranks",
           [](CudaProcessGroup& group) {
             py::list absent;
             for (const int rank : group.host().absent_ranks()) absent.append(rank);
             return absent;
           })
      .def("seal", [](CudaProcessGroup& group) { group.host().seal(); })
      .def("connect",
           [](CudaProcessGroup& group) {
             const PythonCall python_call;
             group.connect();
           })
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
             return run_or_submit(
                 group, CallBuilder(*group, CallKind::kBarrier, "barrier").finish(), async_op);
           })
      .def("bind",
           [](const GroupPtr& group, py::handle tensors, py::handle op, py::handle algorithm) {
             group->host().check_usable();
             return make_bound(group, prepare_all_reduce(*group, tensors, op, algorithm, "bind"));
           })
      .def("close", &CudaProcessGroup::close, py::call_guard<py::gil_scoped_release>())
      .def("stats", &stats_dict)
      .def("delay", [](CudaProcessGroup& group, py::handle phase, double seconds) {
        const auto parsed = parse<Phase>(phase, "phase", &phase_name, kNumPhases);
        const py::gil_scoped_release release;
        group.host().delay(parsed, to_nanoseconds(seconds));
      });
}

}  // namespace pyringar
