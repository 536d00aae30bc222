// shared_segment: Python functions that create and open a group's shared memory.
//
// Contract  All ranks of a group use the same module, since compilers may lay out memory
//           differently.
// Threads   with the GIL held.
// Tests     tests/test_process_life.py
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <vector>

#include "os/shared_memory.h"
#include "process/segment.h"

namespace pyringar {

namespace py = pybind11;

inline SegmentToken parse_token(const py::bytes& token) {
  const std::string_view text = token;
  SegmentToken parsed{};
  std::memcpy(parsed.data(), text.data(), std::min(text.size(), kTokenBytes));
  return parsed;
}

inline void def_shared_segment(py::module_& m) {
  constexpr const char* kOwner = "a group of processes";
  py::class_<SharedMemory>(m, "SharedMemory", py::module_local())
      .def_property_readonly("fd", &SharedMemory::fd);
  // create_segment() returns new shared memory with an initialized segment.
  m.def("create_segment", [](const std::vector<int>& global_ranks, const py::bytes& token) {
    const int world_size = static_cast<int>(global_ranks.size());
    SharedMemory memory = SharedMemory::create(Segment::bytes_for(world_size), kOwner);
    Segment::lay_out(memory.data(), world_size, parse_token(token), global_ranks);
    return memory;
  });
  m.def("open_segment", [](std::int32_t pid, int fd, int world_size) {
    return SharedMemory::open(pid, fd, Segment::bytes_for(world_size), kOwner);
  });
}

}  // namespace pyringar
