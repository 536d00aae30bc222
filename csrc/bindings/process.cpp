// process: the class ProcessGroup, and shared memory.
//
// Floor     bindings
// Tests     tests/test_processes.py

#include "bindings/process.h"

#include <pybind11/functional.h>

#include <memory>
#include <vector>

#include "bindings/convert.h"
#include "bindings/process_prepare.h"
#include "core/error.h"
#include "os/memory.h"
#include "process/group.h"

namespace pyringar {

namespace {

constexpr const char* kAlgorithms[] = {"direct", "ring"};
const char* wish_name(int wish) { return kAlgorithms[wish]; }

// A communicator that was made before fork() is the parent's: its thread is not in the child.
struct GroupDeleter {
  void operator()(ProcessGroup* group) const {
    if (!group->forked()) delete_group(group, group->has_this_thread());
  }
};
using GroupPtr = std::shared_ptr<ProcessGroup>;

bool parse_ring(py::handle algorithm) {
  return !algorithm.is_none() && parse<int>(algorithm, "algorithm", &wish_name, 2) == 1;
}

void run(ProcessGroup& group, const ProcessCall& call) {
  const PythonCall python_call(group.turn());
  group.run(call);
}

// A call that was checked once; see the one of bindings/module.cpp.
struct BoundCall {
  GroupPtr group;
  PreparedCall prepared;
  py::list storages;

  BoundCall(GroupPtr g, PreparedCall p)
      : group(std::move(g)), prepared(std::move(p)), storages(storages_of({prepared.written})) {}
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

py::object make_bound(GroupPtr group, PreparedCall prepared) {
  static PyMethodDef method = {"bound_all_reduce", &call_bound, METH_NOARGS,
                               "Reduce the bound tensors in place."};
  auto bound = std::make_unique<BoundCall>(std::move(group), std::move(prepared));
  const py::capsule capsule(bound.release(), kBoundCapsule, [](PyObject* c) {
    delete static_cast<BoundCall*>(PyCapsule_GetPointer(c, kBoundCapsule));
  });
  return py::reinterpret_steal<py::object>(PyCFunction_New(&method, capsule.ptr()));
}

// What def_process_calls() asks for.
struct Calls {
  using GroupPtr = pyringar::GroupPtr;
  static ProcessGroup& host(ProcessGroup& group) { return group; }
  static LocalRank local_rank(const ProcessGroup& group) {
    return {group.rank(), group.world_size(), kHost, group.compares_shapes()};
  }
  static PreparedCall prepare_all_reduce(ProcessGroup& group, py::handle tensors, py::handle op,
                                         py::handle algorithm, const char* operation) {
    PreparedCall prepared =
        prepare_process_all_reduce(local_rank(group), tensors, parse_op(op), operation);
    prepared.call.wants_ring = parse_ring(algorithm);
    group.find_registered(prepared.call);
    return prepared;
  }
  static py::object run_or_submit(const GroupPtr& group, PreparedCall prepared,
                                  py::handle in_flight) {
    group->check_usable();
    mark_written(prepared.written.ptr());
    if (!in_flight.is_none()) {
      py::list storages = storages_of({prepared.written, prepared.read});
      auto work = group->submit(std::move(prepared.call));
      return keep_until_done(in_flight, py::cast(work), std::move(storages));
    }
    run(*group, prepared.call);
    return py::none();
  }
  static py::object bind(const GroupPtr& group, PreparedCall prepared) {
    return make_bound(group, std::move(prepared));
  }
};

GroupPtr make_group(SharedMemory& memory, int rank, int world_size, const py::bytes& token,
                    double timeout_s, bool checks_digests, bool compares_shapes) {
  const Segment segment =
      Segment::attach(memory.data(), memory.bytes(), world_size, parse_token(token));
  const ProcessGroupOptions options{to_nanoseconds(timeout_s), checks_digests, compares_shapes,
                                    &look_at_signals};
  return GroupPtr(new ProcessGroup(std::move(memory), segment, rank, options), GroupDeleter{});
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
             const PythonCall python_call;  // a tenth of a second for each GiB
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
  m.def("memory_left_bytes", &memory_left_bytes, py::arg("root") = "");  // tests have other roots
  m.def("create_segment", &create_segment);
  m.def("open_segment", &open_segment);
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
  py::class_<ProcessGroup, GroupPtr> group(m, "ProcessGroup");
  def_process_calls<Calls>(group);
  group
      .def(py::init(&make_group), py::arg("memory"), py::arg("rank"), py::arg("world_size"),
           py::arg("token"), py::arg("timeout_s"), py::arg("checks_digests"),
           py::arg("compares_shapes") = true)
      .def("add_region", &add_region)
      .def("remove_region", &ProcessGroup::remove_region, py::call_guard<PythonCall>())
      .def("plan",
           [](const ProcessGroup& group, std::size_t nbytes, py::handle dtype,
              py::handle algorithm) {
             const auto parsed = parse<DType>(dtype, "dtype", &dtype_name, kNumDTypes);
             return process_plan_dict(group.plan(nbytes, parsed, parse_ring(algorithm)));
           })
      .def("submit_step", &ProcessGroup::submit_step)  // the step takes the GIL by itself
      .def("stats", [](ProcessGroup& group) { return process_stats_dict(group.stats()); })
      .def("flip_bit_of_next", &ProcessGroup::flip_bit_of_next, py::call_guard<PythonCall>());
}

}  // namespace pyringar
