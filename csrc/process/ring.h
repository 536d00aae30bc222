// ring: the ring program between processes, which see each other's slots only.
//
// Units     elements; memory borrowed for the call.
// Contract  as cpu/ring.h, in place: chunk c is added in the order of ranks c+1, ..., c+k (mod k).
//           Results are the bits of the ring on threads. All ranks have agreed on the call.
// Threads   one call per rank, all at once. False: a wait failed; the watch says why.
// Source    core/ring_program.h
// Tests     tests/test_processes.py, tests/cpp/process_test.cpp
#pragma once

#include "process/call.h"

namespace pyringar {

bool run_process_ring(const TensorSpan& tensor, Fold fold, ProcessRank& self);

}  // namespace pyringar
