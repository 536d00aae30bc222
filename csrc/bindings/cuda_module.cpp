// cuda_module: the Python module _cuda_engine. cuda_process.cpp adds ranks in processes.
//
// Contract  Group has the methods of the CPU engine's Group. The import needs no GPU and no driver.
// Tests     tests/cuda, tests/build/test_cuda_build.py
#include <pybind11/pybind11.h>

#include <memory>
#include <mutex>

#include "bindings/cuda_ready_events.h"
#include "bindings/group_binding.h"
#include "cuda/background.h"
#include "cuda/device_group.h"
#include "cuda/runtime.h"
#include "os/process.h"

namespace pyringar {

namespace {

using Streams = std::vector<cudaStream_t>;

Streams current_streams(const std::vector<int>& devices) {
  Streams streams;
  for (const int device : devices) {
    streams.push_back(static_cast<cudaStream_t>(current_stream(device)));
  }
  return streams;
}

// Raise if the group failed or is closed. Release the GIL only to wait for the group's lock.
void check_usable(cuda::DeviceGroup& group) {
  if (group.try_check_usable()) return;
  const GilRelease no_gil;
  group.check_usable();
}

// An asynchronous call on the group's separate streams.
class CudaWork {
 public:
  // latest: capture id of the group's latest call, shared by all works of the group.
  CudaWork(std::shared_ptr<cuda::DeviceGroup> group, std::shared_ptr<cuda::DoneEvents> done,
           std::shared_ptr<const cuda::CaptureId> latest)
      : group_(std::move(group)), done_(std::move(done)), latest_(std::move(latest)) {}

  // A captured call counts as completed once the group's latest call has another capture id.
  bool is_completed() const {
    return done_->capture() == 0 ? done_->is_done() : done_->capture() != *latest_;
  }
  // Make the current streams wait for the call. The host does not wait.
  bool wait() {
    done_->make_wait(current_streams(group_->devices()));
    check_usable(*group_);
    return true;
  }
  py::object exception() {
    try {
      if (is_completed()) check_usable(*group_);
    } catch (...) {
      return as_exception(std::current_exception());
    }
    return py::none();
  }

 private:
  const std::shared_ptr<cuda::DeviceGroup> group_;
  const std::shared_ptr<cuda::DoneEvents> done_;
  const std::shared_ptr<const cuda::CaptureId> latest_;
};

// A DeviceGroup, its asynchronous calls and its prepared calls.
class BoundCudaGroup : public ForkGuard {
 public:
  BoundCudaGroup(std::vector<int> devices, std::chrono::nanoseconds timeout)
      : devices_(std::move(devices)),
        group_(std::make_shared<cuda::DeviceGroup>(devices_, timeout)),
        background_(group_) {}

  CallCache calls;

  LocalRanks ranks() const {
    return {.world_size = static_cast<int>(devices_.size()), .devices = &devices_};
  }
  bool has_this_thread() const { return false; }
  void check_usable() { pyringar::check_usable(group()); }
  void check() { group().try_check_usable(); }
  // Raise in a forked child: CUDA does not work there, and the group's lock may be held.
  cuda::DeviceGroup& group() {
    check_not_forked();
    return *group_;
  }

  void run(const Collective& collective) {
    const Streams streams = current_streams(group_->devices());
    const GilRelease no_gil;
    group_->run(collective, streams);
  }
  py::object submit(const Collective& collective, cuda::BucketReady bucket) {
    const Streams streams = current_streams(group_->devices());
    std::shared_ptr<cuda::DoneEvents> done;
    {
      const GilRelease no_gil;
      const std::lock_guard<std::mutex> lock(background_mutex_);
      done = background_.submit(collective, streams, bucket);
    }
    return work(std::move(done));
  }
  // Wait for asynchronous calls first, since the caller may free their tensors after close().
  void close() {
    const std::lock_guard<std::mutex> lock(background_mutex_);
    background_.wait_for();
    group().close();
  }
  // Return a work that completes when all work now on the current streams has run.
  py::object enqueued() const {
    const Streams streams = current_streams(group_->devices());
    return work(std::make_shared<cuda::DoneEvents>(group_->devices(), streams));
  }

 private:
  py::object work(std::shared_ptr<cuda::DoneEvents> done) const {
    *latest_capture_ = done->capture();
    return py::cast(std::make_shared<CudaWork>(group_, std::move(done), latest_capture_));
  }

  const std::vector<int> devices_;  // by rank
  const std::shared_ptr<cuda::DeviceGroup> group_;
  std::mutex background_mutex_;
  cuda::Background background_;
  const std::shared_ptr<cuda::CaptureId> latest_capture_ = std::make_shared<cuda::CaptureId>(0);
};

struct CudaTransport {
  using Group = BoundCudaGroup;
  using GroupPtr = std::shared_ptr<Group>;

  static Group& host(Group& group) { return group; }
  static LocalRanks ranks(const Group& group) { return group.ranks(); }
  static void run(Group& group, const Collective& collective, PyObject* written) {
    mark_written(written);
    group.run(collective);
  }
  static py::object submit(const GroupPtr& group, const Collective& collective, py::handle after) {
    if (after.is_none()) return group->submit(collective, {});
    const auto pair = py::reinterpret_borrow<py::tuple>(after);  // (ready events, bucket index)
    return group->submit(collective,
                         pair[0].cast<const BoundReadyEvents&>().bucket(pair[1].cast<int>()));
  }
  static py::object enqueued(const GroupPtr& group) { return group->enqueued(); }
  static void wait_until_free(Group&) {}
};

void bind_group(py::module_& m) {
  py::class_<BoundCudaGroup, CudaTransport::GroupPtr> group(m, "Group");
  def_list_calls<CudaTransport>(group);
  group
      .def(py::init([](std::vector<int> devices, double timeout_s) {
        const GilRelease no_gil;  // making a group enables and tests peer access
        return new_group<CudaTransport>(std::move(devices), to_nanoseconds(timeout_s));
      }))
      .def("abort",
           [](BoundCudaGroup& self) {
             const GilRelease no_gil;
             self.group().abort();
           })
      .def("make_ready",
           [](const BoundCudaGroup& self, std::vector<int> bucket_sizes) {
             return std::make_unique<BoundReadyEvents>(*self.ranks().devices,
                                                       std::move(bucket_sizes));
           })
      .def("has_peers", [](BoundCudaGroup& self) { return self.group().has_peers(); })
      .def("stats",
           [](BoundCudaGroup& self) {
             const auto stats = [&] {
               const GilRelease no_gil;
               return self.group().stats();
             }();
             return stats_dict(stats, &algorithm_name, false);
           })
      .def("withhold_rank",
           [](BoundCudaGroup& self, int rank) {
             const GilRelease no_gil;
             self.group().withhold_rank(rank);
           })
      .def("close", [](BoundCudaGroup& self) {
        if (self.forked()) return false;
        const GilRelease no_gil;
        self.close();
        return true;
      });
}

}  // namespace

PYBIND11_MODULE(_cuda_engine, m) {
  m.doc() = "The CUDA engine of pyringar; use pyringar.Communicator.";
  py::register_local_exception_translator(&translate);
  py::class_<CudaWork, std::shared_ptr<CudaWork>>(m, "Work")
      .def("is_completed", &CudaWork::is_completed)
      .def("exception", &CudaWork::exception)
      .def("finished_ns", [](CudaWork&) { return 0; })  // the host does not know the time
      .def("wait", [](CudaWork& work, double) { return work.wait(); });
  py::class_<BoundReadyEvents>(m, "Ready")
      .def("hook", &BoundReadyEvents::hook)
      .def("make_wait", &BoundReadyEvents::make_wait, py::arg("bucket"), py::arg("rank"));
  bind_group(m);
  bind_cuda_process_group(m);
  m.def("end_reading", &TensorReadGuard::end);
  m.def("num_devices", &cuda::num_devices);
  m.def("runtime_version", [] { return CUDART_VERSION; });
}

}  // namespace pyringar
