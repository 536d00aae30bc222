// process: one rank of a group of processes as Python sees it, and shared memory.
//
// Contract  pyringar.comm.process_communicator is its only user. Every argument is checked before
//           anything is announced to the other ranks.
// Tests     tests/conformance/test_bits.py

#include <pybind11/functional.h>

#include <memory>
#include <optional>

#include "bindings/group_binding.h"
#include "process/group.h"

namespace pyringar {

namespace {

struct Engine {
  using Group = ProcessGroup;
  using GroupPtr = std::shared_ptr<Group>;

  static Group& host(Group& group) { return group; }
  static LocalRank local_rank(const Group& group) {
    return {group.rank(), group.world_size(), kHost, group.compares_shapes()};
  }
  static void run(Group& group, const ProcessCall& call) {
    const PythonCall python_call;
    group.run(call);
  }
  // written: the list or tuple of the tensors that it writes. What is small is done before the GIL
  // would have changed hands, if the others are there.
  static void mark_and_run(Group& group, const ProcessCall& call, PyObject* written) {
    if (call.bytes() > kExchangeBytes) {
      mark_written(written);
      return run(group, call);
    }
    const PythonCall python_call(written);
    group.run(call);
  }
  static py::object submit(const GroupPtr& group, ProcessCall call, py::handle) {
    return py::cast(group->submit(std::move(call)));
  }
};

// all_reduce of one plain tensor, now: in a third of the time that the general way takes.
struct PlainAllReduce {
  Engine::GroupPtr group;
  Order order;
  ProcessCall call;      // of this time; its memory is kept for the next
  bool is_busy = false;  // with another thread's call, or with that which a signal interrupted

  // (tensor, op, algorithm, order) -> bool. False: not done, the general way has to look at it.
  static PyObject* run(PyObject* capsule, PyObject* const* args, Py_ssize_t num_args) {
    try {
      auto& self = state_of<PlainAllReduce>(capsule);
      const bool names_only_op = num_args == 4 && args[2] == Py_None && args[3] == Py_None;
      if (names_only_op && self.reduce(args[0], args[1])) Py_RETURN_TRUE;
    } catch (...) {
      set_python_error(std::current_exception());
      return nullptr;
    }
    Py_RETURN_FALSE;
  }

  // given: the tensor, or a list of it alone.
  bool reduce(PyObject* given, PyObject* op_given) {
    const std::optional<ReduceOp> op = find<ReduceOp>(op_given, &op_name, kNumReduceOps);
    if (is_busy || !op || !has_order(*op, order)) return false;
    // From the first look on: torch gives the GIL away meanwhile.
    is_busy = true;
    const std::unique_ptr<bool, void (*)(bool*)> busy(&is_busy, [](bool* flag) { *flag = false; });
    const bool is_list = PyList_CheckExact(given) && PyList_GET_SIZE(given) == 1;
    const auto tensor =
        py::reinterpret_borrow<py::object>(is_list ? PyList_GET_ITEM(given, 0) : given);
    if (!make_plain_all_reduce(Engine::local_rank(*group), tensor.ptr(), {*op, order}, &call))
      return false;
    group->check_usable();
    Engine::mark_and_run(*group, call, py::make_tuple(tensor).ptr());
    return true;
  }
};

py::object plain_all_reduce(const Engine::GroupPtr& group, py::handle order) {
  static PyMethodDef method = {
      "plain_all_reduce",
      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&PlainAllReduce::run)),
      METH_FASTCALL, "Reduce one plain tensor, or return False."};
  return function_over(
      method, std::unique_ptr<PlainAllReduce>(new PlainAllReduce{group, parse_order(order), {}}));
}

Engine::GroupPtr make_group(SharedMemory& memory, int rank, int world_size, const py::bytes& token,
                            double timeout_s, bool compares_shapes) {
  const Segment segment = Segment::attach(memory.data(), world_size, parse_token(token));
  const ProcessGroupOptions options{to_nanoseconds(timeout_s), compares_shapes, &look_at_signals,
                                    &let_others_run, &mark_announced};
  return Engine::GroupPtr(new ProcessGroup(std::move(memory), segment, rank, options),
                          GroupDeleter<Engine>{});
}

void bind_shared_memory(py::module_& m) {
  py::class_<SharedMemory>(m, "SharedMemory").def_property_readonly("fd", &SharedMemory::fd);
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
  py::class_<ProcessGroup, Engine::GroupPtr> group(m, "ProcessGroup");
  def_process_calls<Engine>(group);
  group
      .def(py::init(&make_group), py::arg("memory"), py::arg("rank"), py::arg("world_size"),
           py::arg("token"), py::arg("timeout_s"), py::arg("compares_shapes") = true)
      .def("plain_all_reduce", &plain_all_reduce)
      .def("submit_step", &ProcessGroup::submit_step);  // the step takes the GIL by itself
}

}  // namespace pyringar
