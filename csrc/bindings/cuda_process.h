// cuda_process: the class ProcessGroup of the CUDA engine's module.
//
// Floor     bindings
// Contract  its calls are those of the CPU engine's ProcessGroup, so that the communicator treats
//           both alike; what a GPU does not do (rings, registered tensors) is not there.
// Threads   with the GIL held; it is released while calls are enqueued.
// Tests     tests/test_cuda_processes.py
#pragma once

#include <pybind11/pybind11.h>

namespace pyringar {

void bind_cuda_process_group(pybind11::module_& m);

}  // namespace pyringar
