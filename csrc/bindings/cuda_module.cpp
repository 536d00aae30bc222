// cuda_module: the CUDA engine as Python sees it: Group, Work, devices and peers; cuda_process adds
// ranks in processes.
//
// Contract  the calls of Group are those of the CPU engine's Group, so that the communicator
//           treats both alike. Importing it needs no GPU and no driver. The GIL is released while
//           kernels are launched.
// Tests     tests/cuda, tests/build/test_cuda_build.py

#include <pybind11/pybind11.h>

#include <memory>

#include "bindings/group_binding.h"
#include "cuda/group.h"
#include "cuda/peers.h"
#include "cuda/runtime.h"
#include "os/process.h"

namespace pyringar {

namespace {

using Streams = std::vector<cudaStream_t>;

// A call that is under way on the communicator's own streams.
class CudaWork {
 public:
  CudaWork(std::shared_ptr<cuda::Group> group, std::vector<cuda::Event> done)
      : group_(std::move(group)), done_(std::move(done)) {}
  CudaWork(const CudaWork&) = delete;
  CudaWork& operator=(const CudaWork&) = delete;

  // While a stream is captured nobody may ask an event: not yet, then.
  bool is_completed() {
    for (std::size_t d = 0; d < done_.size(); ++d) {
      const int device = group_->devices()[d];
      const auto stream = static_cast<cudaStream_t>(current_stream(device));
      if (cuda::is_capturing(stream, device) || !done_[d].is_done()) return false;
    }
    return true;
  }
  // Orders the current streams after it; the host goes on.
  bool wait() {
    for (std::size_t d = 0; d < done_.size(); ++d) {
      const int device = group_->devices()[d];
      done_[d].make_wait(static_cast<cudaStream_t>(current_stream(device)), device);
    }
    group_->check_usable();
    return true;
  }
  py::object exception() {
    try {
      if (is_completed()) group_->check_usable();
    } catch (...) {
      return as_exception(std::current_exception());
    }
    return py::none();
  }

 private:
  const std::shared_ptr<cuda::Group> group_;
  const std::vector<cuda::Event> done_;
};

// A group with the streams that its asynchronous calls run on.
class StreamedGroup {
 public:
  StreamedGroup(std::vector<int> devices, double timeout_s)
      : devices_(std::move(devices)),
        group_(std::make_shared<cuda::Group>(devices_, to_nanoseconds(timeout_s))) {}
  StreamedGroup(const StreamedGroup&) = delete;
  StreamedGroup& operator=(const StreamedGroup&) = delete;

  Ranks ranks() const { return {static_cast<int>(devices_.size()), &devices_}; }
  bool forked() const { return fork_generation() != fork_generation_; }
  bool has_this_thread() const { return false; }
  void check_usable() { group().check_usable(); }
  // CUDA does not live through fork(), and a thread may have held the group's lock.
  cuda::Group& group() {
    if (forked()) fail_forked();
    return *group_;
  }

  void run(const Collective& collective) { launch(collective, current_streams()); }

  py::object submit(const Collective& collective) {
    const Streams current = current_streams();
    if (own_.empty()) {
      for (const int device : group_->devices()) own_.emplace_back(device);
    }
    Streams own;
    for (std::size_t d = 0; d < own_.size(); ++d) {
      own.push_back(own_[d].get());
      const cuda::Event ready(group_->devices()[d]);
      ready.record(current[d]);
      ready.make_wait(own[d], group_->devices()[d]);
    }
    launch(collective, own);
    return work(own);
  }

  // The work of all that is on the current streams.
  py::object enqueued() const { return work(current_streams()); }

 private:
  Streams current_streams() const {
    Streams streams;
    for (const int device : group_->devices()) {
      streams.push_back(static_cast<cudaStream_t>(current_stream(device)));
    }
    return streams;
  }
  void launch(const Collective& collective, const Streams& streams) {
    const PythonCall python_call;
    group_->run(collective, streams);
  }
  py::object work(const Streams& streams) const {
    std::vector<cuda::Event> done;
    for (std::size_t d = 0; d < streams.size(); ++d) {
      done.emplace_back(group_->devices()[d]);
      done.back().record(streams[d]);
    }
    return py::cast(std::make_shared<CudaWork>(group_, std::move(done)));
  }

  const std::vector<int> devices_;  // by rank
  const std::uint32_t fork_generation_ = fork_generation();
  const std::shared_ptr<cuda::Group> group_;
  std::vector<cuda::Stream> own_;
};

struct Engine {
  using Group = StreamedGroup;
  using GroupPtr = std::shared_ptr<Group>;

  static Group& host(Group& group) { return group; }
  static Ranks ranks(const Group& group) { return group.ranks(); }
  static void run(Group& group, const Collective& collective) { group.run(collective); }
  static py::object submit(const GroupPtr& group, const Collective& collective) {
    return group->submit(collective);
  }
  static py::object enqueued(const GroupPtr& group) { return group->enqueued(); }
  static void wait_for_turn(Group&) {}
};

void bind_group(py::module_& m) {
  py::class_<StreamedGroup, Engine::GroupPtr> group(m, "Group");
  def_rank_calls<Engine>(group);
  group
      .def(py::init([](std::vector<int> devices, double timeout_s) {
             return Engine::GroupPtr(new StreamedGroup(std::move(devices), timeout_s),
                                     GroupDeleter<Engine>{});
           }),
           py::arg("devices"), py::arg("timeout_s"))
      .def("check_usable", &StreamedGroup::check_usable)
      .def("has_peers", [](StreamedGroup& self) { return self.group().has_peers(); })
      .def("stats",
           [](StreamedGroup& self) {
             return stats_dict(self.group().stats(), &algorithm_name, false);
           })
      .def("withhold_rank", [](StreamedGroup& self, int rank) { self.group().withhold_rank(rank); })
      .def("close", [](StreamedGroup& self) {
        if (self.forked()) return false;
        const PythonCall python_call;
        self.group().close();
        return true;
      });
}

py::list peer_matrix(std::vector<int> devices) {
  py::list links;
  for (const cuda::PeerLink& link : cuda::peer_links(devices)) {
    links.append(py::make_tuple(link.from, link.to, link.can_access, link.delivers));
  }
  return links;
}

}  // namespace

PYBIND11_MODULE(_cuda_engine, m) {
  m.doc() = "The CUDA engine of pyringar; use pyringar.Communicator.";
  py::register_local_exception_translator(&translate);
  py::class_<CudaWork, std::shared_ptr<CudaWork>>(m, "Work")
      .def("is_completed", &CudaWork::is_completed)
      .def("exception", &CudaWork::exception)
      .def("finished_ns", [](CudaWork&) { return 0; })  // nobody on the host waits for it
      .def("wait", [](CudaWork& work, double) { return work.wait(); });
  bind_group(m);
  bind_cuda_process_group(m);
  m.def("end_reading", &Reading::end);
  m.def("num_devices", &cuda::num_devices);
  m.def("peer_links", &peer_matrix, py::arg("devices"));
  m.def("runtime_version", [] { return CUDART_VERSION; });
}

}  // namespace pyringar
