// cuda_process: the class ProcessGroup of _cuda_engine: ranks in processes with tensors on GPUs.
//
// Contract  It has the methods of the CPU engine's ProcessGroup.
// Tests     tests/test_cuda_processes.py
#include <memory>
#include <string>

#include "bindings/cuda_ready_events.h"
#include "bindings/shared_segment.h"
#include "cuda_process/cuda_process_group.h"

namespace pyringar {

namespace {

cudaStream_t stream_of(const CudaProcessGroup& group) {
  return static_cast<cudaStream_t>(current_stream(group.device()));
}

// An asynchronous call on the group's separate stream.
class CudaProcessWork {
 public:
  CudaProcessWork(std::shared_ptr<CudaProcessGroup> group, CudaProcessGroup::Submitted submitted)
      : group_(std::move(group)), submitted_(std::move(submitted)) {}

  // Return False while the current stream is captured, since events cannot be queried then.
  bool is_completed() {
    if (submitted_.enqueued != nullptr && !submitted_.enqueued->is_completed()) return false;
    return !cuda::is_capturing(stream_of(*group_), group_->device()) && submitted_.done->is_done();
  }
  // Wait on the host until the call is enqueued, then make the current stream wait for it.
  bool wait(double timeout_s) {
    try {
      if (submitted_.enqueued != nullptr && !wait_for(*submitted_.enqueued, timeout_s)) {
        return false;
      }
    } catch (const Error&) {
      // failure_of() marks the failure as reported, so that close() does not repeat it
      group_->failure_of(submitted_);
      throw;
    }
    submitted_.done->make_wait(stream_of(*group_), group_->device());
    if (const std::exception_ptr failure = group_->failure_of(submitted_)) {
      std::rethrow_exception(failure);
    }
    return true;
  }
  std::string describe() {
    return submitted_.enqueued != nullptr ? submitted_.enqueued->describe() : "";
  }
  py::object exception() { return as_exception(group_->failure_of(submitted_)); }

 private:
  const std::shared_ptr<CudaProcessGroup> group_;
  const CudaProcessGroup::Submitted submitted_;
};

// A CudaProcessGroup, its prepared calls, and its device.
struct BoundCudaProcessGroup : GroupWithCache<CudaProcessGroup> {
  using GroupWithCache<CudaProcessGroup>::GroupWithCache;
  const std::vector<int> devices = {device()};
};

struct CudaProcessTransport {
  using Group = BoundCudaProcessGroup;
  using GroupPtr = std::shared_ptr<Group>;

  static ProcessGroup& host(Group& group) { return group.host(); }
  static LocalRanks ranks(Group& group) {
    return {group.host().world_size(), group.host().rank(), true, true, &group.devices};
  }
  static void run(Group& group, const Collective& call, PyObject* written) {
    mark_written(written);
    const cudaStream_t stream = stream_of(group);
    const GilRelease no_gil;
    group.run(call, stream);
  }
  static py::object submit(const GroupPtr& group, Collective call, py::handle) {
    return work(group, group->submit(std::move(call), stream_of(*group)));
  }
  static py::object enqueued(const GroupPtr& group) {
    return work(group, group->enqueued(stream_of(*group)));
  }

 private:
  static py::object work(const GroupPtr& group, CudaProcessGroup::Submitted submitted) {
    return py::cast(std::make_shared<CudaProcessWork>(group, std::move(submitted)));
  }
};

py::dict limits() {
  using namespace py::literals;
  const CudaProcessOptions options;
  return py::dict("process_slot"_a = options.slot_bytes,
                  "process_shared_slot"_a = options.most_shared_slot_bytes,
                  "process_exchange"_a = options.exchange_bytes);
}

CudaProcessTransport::GroupPtr make_group(SharedMemory& memory, int rank, int world_size,
                                          const py::bytes& token, double timeout_s, int device) {
  const Segment segment = Segment::attach(memory.data(), world_size, parse_token(token));
  const CudaProcessOptions options{to_nanoseconds(timeout_s), &check_signals};
  return new_group<CudaProcessTransport>(std::move(memory), segment, rank, device, options);
}

}  // namespace

void bind_cuda_process_group(py::module_& m) {
  def_shared_segment(m);
  m.def("limits", &limits);
  py::class_<CudaProcessWork, std::shared_ptr<CudaProcessWork>>(m, "ProcessWork")
      .def("is_completed", &CudaProcessWork::is_completed)
      .def("exception", &CudaProcessWork::exception)
      .def("finished_ns", [](CudaProcessWork&) { return 0; })  // the host does not know the time
      .def("wait", &CudaProcessWork::wait)
      .def("describe", &CudaProcessWork::describe);
  py::class_<BoundCudaProcessGroup, CudaProcessTransport::GroupPtr> group(m, "ProcessGroup");
  def_process_calls<CudaProcessTransport>(group);
  group.def(py::init(&make_group))
      .def("connect",
           [](BoundCudaProcessGroup& group) {
             const GilRelease no_gil;
             group.connect();
           })
      .def("make_ready",
           [](const BoundCudaProcessGroup& group, std::vector<int> bucket_sizes) {
             return std::make_unique<BoundReadyEvents>(group.devices, std::move(bucket_sizes));
           })
      .def("slot_bytes", &CudaProcessGroup::slot_bytes);
}

}  // namespace pyringar
