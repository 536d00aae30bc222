// process: the class ProcessGroup of _engine: one rank of a group of processes.
//
// Contract  Only pyringar.comm.process_communicator uses it. All arguments are checked before the
//           call is announced to other ranks.
// Tests     tests/conformance/test_bits.py
#include <pybind11/functional.h>

#include <memory>

#include "bindings/group_binding.h"
#include "bindings/shared_segment.h"
#include "process/process_group.h"

namespace pyringar {

namespace {

struct ProcessTransport {
  using Group = GroupWithCache<ProcessGroup>;
  using GroupPtr = std::shared_ptr<Group>;

  static Group& host(Group& group) { return group; }
  static LocalRanks ranks(const Group& group) {
    return {group.world_size(), group.rank(), true, group.compares_shapes()};
  }
  // A short call keeps the GIL until it waits: if it never waits, releasing the GIL takes longer.
  static void run(Group& group, const Collective& call, PyObject* written) {
    if (call.bytes <= kExchangeBytes) {
      const GilRelease no_gil(written);
      return group.run(call);
    }
    mark_written(written);
    const GilRelease no_gil;
    group.run(call);
  }
  static py::object submit(const GroupPtr& group, Collective call, py::handle) {
    return py::cast(group->submit(std::move(call)));
  }
};

ProcessTransport::GroupPtr make_group(SharedMemory& memory, int rank, int world_size,
                                      const py::bytes& token, double timeout_s,
                                      bool compares_shapes) {
  const Segment segment = Segment::attach(memory.data(), world_size, parse_token(token));
  const ProcessGroupOptions options{to_nanoseconds(timeout_s), compares_shapes, &check_signals,
                                    &release_gil, &mark_tensors_written};
  return new_group<ProcessTransport>(std::move(memory), segment, rank, options);
}

}  // namespace

void bind_process_group(py::module_& m) {
  def_shared_segment(m);
  m.def("process_id", [] {
    const ProcessId self = this_process();
    return py::make_tuple(self.pid, self.start_ticks);
  });
  m.def("is_alive",
        [](std::int32_t pid, std::uint64_t start_ticks) { return is_alive({pid, start_ticks}); });
  py::class_<ProcessTransport::Group, ProcessTransport::GroupPtr> group(m, "ProcessGroup");
  def_process_calls<ProcessTransport>(group);
  group.def(py::init(&make_group))
      .def("submit_step", &ProcessGroup::submit_step);  // acquires the GIL to run the step
}

}  // namespace pyringar
