// cuda_module: the CUDA engine as Python sees it: CudaGroup, CudaWork, devices and peers; what is
// for ranks in processes comes from cuda_process.
//
// Floor     bindings
// Contract  the calls of CudaGroup are those of the CPU engine's Group, so that the communicator
//           treats both alike. Importing it needs no GPU and no driver. The GIL is released while
//           kernels are launched.
// Tests     tests/test_cuda.py, tests/build/test_cuda_build.py

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>

#include "bindings/convert.h"
#include "bindings/cuda_process.h"
#include "bindings/prepare.h"
#include "bindings/python_call.h"
#include "bindings/tensor.h"
#include "core/error.h"
#include "cuda/group.h"
#include "cuda/peers.h"
#include "cuda/runtime.h"
#include "os/process.h"

namespace pyringar {

namespace {

using CudaGroup = cuda::Group;
using Streams = std::vector<cudaStream_t>;

// A call that is under way on the communicator's own streams.
class CudaWork {
 public:
  CudaWork(std::shared_ptr<CudaGroup> group, std::vector<cuda::Event> done)
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
      set_python_error(std::current_exception());
      const py::error_already_set raised;
      return py::reinterpret_borrow<py::object>(raised.value());
    }
    return py::none();
  }

 private:
  const std::shared_ptr<CudaGroup> group_;
  const std::vector<cuda::Event> done_;
};

// A group with the streams that its asynchronous calls run on.
class Ranked {
 public:
  Ranked(std::vector<int> place, double timeout_s)
      : place_(std::move(place)),
        group_(std::make_shared<CudaGroup>(
            place_,
            std::chrono::nanoseconds(static_cast<std::int64_t>(std::min(timeout_s, 1e9) * 1e9)))) {}

  Ranked(const Ranked&) = delete;
  Ranked& operator=(const Ranked&) = delete;

  Ranks ranks() const { return {static_cast<int>(place_.size()), &place_}; }
  bool forked() const { return fork_generation() != fork_generation_; }
  // CUDA does not live through fork(), and a thread may have held the group's lock.
  CudaGroup& group() {
    if (forked()) {
      fail(ErrorKind::kState,
           "this communicator was made before fork() and is the parent process's. Make a new "
           "Communicator in the child");
    }
    return *group_;
  }

  py::object run(Prepared prepared, py::handle in_flight) {
    group().check_usable();
    mark_written(prepared.written.ptr());
    const Streams current = current_streams();
    if (in_flight.is_none()) {
      launch(prepared.collective, current);
      copy_back(prepared);
      return py::none();
    }
    if (comm_.empty()) {
      for (const int device : group_->devices()) comm_.emplace_back(device);
    }
    Streams comm;
    for (std::size_t d = 0; d < comm_.size(); ++d) {
      comm.push_back(comm_[d].get());
      const cuda::Event ready(group_->devices()[d]);
      ready.record(current[d]);
      ready.make_wait(comm[d], group_->devices()[d]);
    }
    py::list storages = storages_of({prepared.written, prepared.read});
    launch(prepared.collective, comm);
    if (py::len(prepared.copies) > 0) {
      // The copies back are torch's, on the current streams: these have to come after.
      order(comm, current);
      copy_back(prepared);
      return keep_until_done(in_flight, work(current),
                             py::make_tuple(std::move(storages), prepared.copies));
    }
    return keep_until_done(in_flight, work(comm), std::move(storages));
  }

  // A checked call; its tensors and their storages stay alive with it.
  py::object bind(Prepared prepared) {
    if (py::len(prepared.copies) > 0) {
      fail(ErrorKind::kUnsupported, prepared.collective.operation,
           ": tensors with gaps, or that lie otherwise on other ranks, cannot be bound on GPUs; "
           "pass "
           ".contiguous() ones");
    }
    const py::list storages = storages_of({prepared.written});
    const auto collective = std::make_shared<const Collective>(std::move(prepared.collective));
    py::object written = prepared.written;
    return py::cpp_function([this, self = py::cast(this), collective, written, storages] {
      group().check_usable();
      mark_written(written.ptr());
      launch(*collective, current_streams());
    });
  }

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
  void order(const Streams& first, const Streams& second) const {
    for (std::size_t d = 0; d < first.size(); ++d) {
      const cuda::Event event(group_->devices()[d]);
      event.record(first[d]);
      event.make_wait(second[d], group_->devices()[d]);
    }
  }
  py::object work(const Streams& streams) const {
    std::vector<cuda::Event> done;
    for (std::size_t d = 0; d < streams.size(); ++d) {
      done.emplace_back(group_->devices()[d]);
      done.back().record(streams[d]);
    }
    return py::cast(std::make_shared<CudaWork>(group_, std::move(done)));
  }
  static void copy_back(const Prepared& prepared) {
    for (const py::handle pair : prepared.copies) {
      const auto both = py::reinterpret_borrow<py::tuple>(pair);
      if (!both[0].is_none()) both[0].attr("detach")().attr("copy_")(both[1]);
    }
  }

  const std::vector<int> place_;
  const std::uint32_t fork_generation_ = fork_generation();
  const std::shared_ptr<CudaGroup> group_;
  std::vector<cuda::Stream> comm_;
};

py::dict stats_dict(Ranked& ranked) {
  const GroupStats stats = ranked.group().stats();
  py::dict by_algorithm;
  for (int i = 0; i < kNumAlgorithms; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (stats.calls[at] == 0) continue;
    py::dict row;
    row["calls"] = stats.calls[at];
    row["bytes"] = stats.bytes[at];
    by_algorithm[algorithm_name(static_cast<Algorithm>(i))] = row;
  }
  return by_algorithm;
}

void bind_group(py::module_& m) {
  py::class_<Ranked>(m, "Group")
      .def(py::init<std::vector<int>, double>(), py::arg("place"), py::arg("timeout_s"))
      .def("all_reduce",
           [](Ranked& self, py::handle tensors, py::handle op, py::handle algorithm,
              py::handle in_flight) {
             return self.run(prepare_all_reduce(tensors, parse_op(op), parse_algorithm(algorithm),
                                                self.ranks(), "all_reduce"),
                             in_flight);
           })
      .def("all_reduce_coalesced",
           [](Ranked& self, py::handle lists, py::handle op, py::handle algorithm,
              py::handle in_flight) {
             return self.run(prepare_all_reduce_coalesced(lists, parse_op(op),
                                                          parse_algorithm(algorithm), self.ranks()),
                             in_flight);
           })
      .def("reduce_scatter",
           [](Ranked& self, py::handle outputs, py::handle inputs, py::handle op,
              py::handle algorithm, py::handle in_flight) {
             return self.run(prepare_reduce_scatter(outputs, inputs, parse_op(op),
                                                    parse_algorithm(algorithm), self.ranks()),
                             in_flight);
           })
      .def("all_gather",
           [](Ranked& self, py::handle outputs, py::handle inputs, py::handle algorithm,
              py::handle in_flight) {
             return self.run(
                 prepare_all_gather(outputs, inputs, parse_algorithm(algorithm), self.ranks()),
                 in_flight);
           })
      .def("broadcast",
           [](Ranked& self, py::handle tensors, int root, py::handle in_flight) {
             return self.run(prepare_broadcast(tensors, root, self.ranks()), in_flight);
           })
      .def("bind",
           [](Ranked& self, py::handle tensors, py::handle op, py::handle algorithm) {
             self.group().check_usable();
             return self.bind(prepare_all_reduce(tensors, parse_op(op), parse_algorithm(algorithm),
                                                 self.ranks(), "bind"));
           })
      .def("check",
           [](Ranked& self, py::handle tensors) {
             self.group().check_usable();
             prepare_all_reduce(tensors, ReduceOp::kSum, Algorithm::kFused, self.ranks(),
                                "all_reduce");
           })
      .def("check_coalesced",
           [](Ranked& self, py::handle lists) {
             self.group().check_usable();
             prepare_all_reduce_coalesced(lists, ReduceOp::kSum, Algorithm::kFused, self.ranks());
           })
      .def("check_usable", [](Ranked& self) { self.group().check_usable(); })
      .def("has_peers", [](Ranked& self) { return self.group().has_peers(); })
      .def("stats", &stats_dict)
      .def("withhold_rank", [](Ranked& self, int rank) { self.group().withhold_rank(rank); })
      .def("close", [](Ranked& self) {
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
  m.def("num_devices", &cuda::num_devices);
  m.def("peer_links", &peer_matrix, py::arg("devices"));
  m.def("runtime_version", [] { return CUDART_VERSION; });
}

}  // namespace pyringar
