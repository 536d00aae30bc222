// process: one rank of a group of processes as Python sees it.
//
// Floor     bindings
// Contract  pyringar.comm.process_communicator is its only user. Every argument is checked before
//           anything is announced to the other ranks; errors arrive as those of pyringar.errors.
//           The GIL is released while data moves and while one waits; signals are looked at then.
// Tests     tests/test_processes.py
#pragma once

#include <pybind11/pybind11.h>

namespace pyringar {

namespace py = pybind11;

void bind_process_group(py::module_& m);

}  // namespace pyringar
