// cuda_process: the class ProcessGroup of ranks whose tensors are on GPUs.
//
// Floor     bindings
// Tests     tests/test_cuda_processes.py

#include "bindings/cuda_process.h"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bindings/convert.h"
#include "bindings/process_prepare.h"
#include "core/error.h"
#include "cuda_process/group.h"

namespace pyringar {

namespace {

namespace py = pybind11;

// A communicator that was made before fork() is the parent's: its thread is not in the child, and
// no CUDA either.
struct GroupDeleter {
  void operator()(CudaProcessGroup* group) const {
    if (!group->host().forked()) delete_group(group, group->host().has_this_thread());
  }
};
using GroupPtr = std::shared_ptr<CudaProcessGroup>;

void check_no_ring(py::handle algorithm, const char* operation) {
  const bool is_ring = PyUnicode_Check(algorithm.ptr()) && algorithm.cast<std::string>() == "ring";
  if (is_ring) {
    fail(ErrorKind::kUnsupported, operation,
         ": algorithm is 'ring', expected 'auto' or 'direct': "
         "ranks in processes of their own have no ring on GPUs");
  }
}

// -- running --------------------------------------------------------------------------------------

cudaStream_t stream_of(const CudaProcessGroup& group) {
  return static_cast<cudaStream_t>(current_stream(group.device()));
}

void run(CudaProcessGroup& group, const ProcessCall& call) {
  const cudaStream_t stream = stream_of(group);
  const PythonCall python_call(group.host().turn());
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
  std::string describe() {
    return submitted_.enqueued != nullptr ? submitted_.enqueued->describe() : "";
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
    const Work& work = *submitted_.enqueued;
    check_can_end(work);
    const PythonCall python_call(work.turn());
    const auto deadline = Clock::now() + to_nanoseconds(timeout_s);
    while (true) {
      const std::chrono::nanoseconds left = deadline - Clock::now();
      if (submitted_.enqueued->wait(std::min<std::chrono::nanoseconds>(left, kNapInterval))) {
        return true;
      }
      if (left <= kNapInterval) return false;
      look_at_signals();
    }
  }

  const GroupPtr group_;
  const CudaProcessGroup::Submitted submitted_;
};

void copy_back(const PreparedCall& prepared) {
  for (const py::handle pair : prepared.copies) {
    const auto both = py::reinterpret_borrow<py::tuple>(pair);
    both[0].attr("detach")().attr("copy_")(both[1]);
  }
}

// A call that was checked once; its tensors and their storages stay alive with it.
py::object make_bound(const GroupPtr& group, PreparedCall prepared) {
  if (py::len(prepared.copies) > 0) {
    fail(ErrorKind::kUnsupported,
         "bind: tensors with gaps between their elements cannot be bound; pass .contiguous() ones");
  }
  const py::list storages = storages_of({prepared.written});
  auto call = std::make_shared<const ProcessCall>(std::move(prepared.call));
  return py::cpp_function([group, call, written = prepared.written, storages] {
    mark_written(written.ptr());
    run(*group, *call);
  });
}

// What def_process_calls() asks for.
struct Calls {
  using GroupPtr = pyringar::GroupPtr;
  static ProcessGroup& host(CudaProcessGroup& group) { return group.host(); }
  static LocalRank local_rank(CudaProcessGroup& group) {
    return {group.host().rank(), group.host().world_size(), group.device()};
  }
  static PreparedCall prepare_all_reduce(CudaProcessGroup& group, py::handle tensors, py::handle op,
                                         py::handle algorithm, const char* operation) {
    check_no_ring(algorithm, operation);
    return prepare_process_all_reduce(local_rank(group), tensors, parse_op(op), operation);
  }
  static py::object run_or_submit(const GroupPtr& group, PreparedCall prepared,
                                  py::handle in_flight) {
    group->host().check_usable();
    mark_written(prepared.written.ptr());
    const bool is_async = !in_flight.is_none();
    if (is_async && py::len(prepared.copies) == 0) {
      const cudaStream_t stream = stream_of(*group);
      py::list storages = storages_of({prepared.written, prepared.read});
      auto submitted = group->submit(std::move(prepared.call), stream);
      auto work = std::make_shared<CudaProcessWork>(group, std::move(submitted));
      return keep_until_done(in_flight, py::cast(work), std::move(storages));
    }
    py::list storages = storages_of({prepared.written, prepared.read});
    run(*group, prepared.call);
    copy_back(prepared);
    if (!is_async) return py::none();
    // The copies back are torch's, on the current stream: there the work ends.
    auto done = std::make_shared<cuda::Event>(group->device());
    done->record(stream_of(*group));
    auto work = std::make_shared<CudaProcessWork>(
        group, CudaProcessGroup::Submitted{nullptr, std::move(done)});
    return keep_until_done(in_flight, py::cast(work),
                           py::make_tuple(std::move(storages), prepared.copies));
  }
  static py::object bind(const GroupPtr& group, PreparedCall prepared) {
    return make_bound(group, std::move(prepared));
  }
};

GroupPtr make_group(SharedMemory& memory, int rank, int world_size, const py::bytes& token,
                    double timeout_s, bool checks_digests, int device) {
  const Segment segment =
      Segment::attach(memory.data(), memory.bytes(), world_size, parse_token(token));
  const CudaProcessOptions options{to_nanoseconds(timeout_s), checks_digests, &look_at_signals};
  return GroupPtr(new CudaProcessGroup(std::move(memory), segment, rank, device, options),
                  GroupDeleter{});
}

// This module's own: the CPU engine's may have been made by another compiler.
void bind_segment(py::module_& m) {
  py::class_<SharedMemory>(m, "SharedMemory", py::module_local())
      .def_property_readonly("fd", &SharedMemory::fd);
  m.def("create_segment", &create_segment);
  m.def("open_segment", &open_segment);
}

}  // namespace

void bind_cuda_process_group(py::module_& m) {
  bind_segment(m);
  py::class_<CudaProcessWork, std::shared_ptr<CudaProcessWork>>(m, "ProcessWork")
      .def("is_completed", &CudaProcessWork::is_completed)
      .def("exception", &CudaProcessWork::exception)
      .def("finished_ns", [](CudaProcessWork&) { return 0; })  // nobody waits for it on the host
      .def("wait", &CudaProcessWork::wait)
      .def("describe", &CudaProcessWork::describe);
  py::class_<CudaProcessGroup, GroupPtr> group(m, "ProcessGroup");
  def_process_calls<Calls>(group);
  group
      .def(py::init(&make_group), py::arg("memory"), py::arg("rank"), py::arg("world_size"),
           py::arg("token"), py::arg("timeout_s"), py::arg("checks_digests"), py::arg("device"))
      .def("connect",
           [](CudaProcessGroup& group) {
             const PythonCall python_call(group.host().turn());
             group.connect();
           })
      .def("plan",
           [](const CudaProcessGroup& group, std::size_t nbytes, py::handle, py::handle algorithm) {
             check_no_ring(algorithm, "plan");
             return process_plan_dict(group.plan(nbytes));
           })
      .def("stats", [](CudaProcessGroup& group) { return process_stats_dict(group.stats()); });
}

}  // namespace pyringar
