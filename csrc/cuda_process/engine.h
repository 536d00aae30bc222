// engine: one collective of one rank among processes with GPUs: what it enqueues, and when the host
// waits.
//
// Units     elements for spans, bytes for pieces and slots.
// Contract  Everything is enqueued on the given stream, in order with what is there before and
//           after. The host waits until the others have enqueued theirs, and for no device. On
//           false the rank's watch knows why; what has been enqueued by then still runs, however it
//           ends. Of ranks that share a GPU, one reduces for all: k processes take 2k - 1 turns
//           there for a piece, not 3k, and move as many bytes.
// Threads   one call at a time per staging.
// Source    process/staged_engines.h
// Tests     tests/cpp/cuda_processes, tests/test_cuda_processes.py
#pragma once

#include <cstddef>

#include "cuda_process/staging.h"
#include "process/call.h"

namespace pyringar::cuda {

// Up to this, every rank reduces everything: one wait instead of two. Not measured yet.
inline constexpr std::size_t kExchangeBytes = 256 * 1024;

// is_direct: an all_reduce where every rank reduces its slice, else everything.
bool run_staged(const Collective& call, bool is_direct, ProcessRank& self,
                const ProcessStaging& staging, cudaStream_t stream);

}  // namespace pyringar::cuda
