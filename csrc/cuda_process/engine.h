// engine: one collective of one rank among processes with GPUs: what it enqueues, and when the host
// waits.
//
// Units     elements for spans, bytes for pieces and slots.
// Contract  Rank order, whatever the size and however it is cut; fp16 and bf16 are rounded once.
//           Everything is enqueued on the given stream, in order with what is there before and
//           after. The host waits until the others have enqueued theirs, and for no device. Nothing
//           of the caller's is written before all ranks agree on the call. On false the rank's
//           watch knows why; what has been enqueued by then still runs, however it ends.
//           Of ranks that share a GPU, one reduces for all: k processes take 2k - 1 turns there for
//           a piece, not 3k, and move as many bytes.
// Threads   one call at a time per staging.
// Source    core/staged_program.h, the program that processes without a GPU run
// Tests     tests/cpp/cuda_processes, tests/test_cuda_processes.py
#pragma once

#include <cstddef>

#include "cuda_process/staging.h"
#include "process/call.h"

namespace pyringar::cuda {

// Up to this, every rank reduces everything: one wait instead of two. Not measured yet.
inline constexpr std::size_t kExchangeBytes = 256 * 1024;

// The call's spans are of the device's memory. is_direct: an all_reduce where every rank reduces
// its slice, else everything.
bool run_staged(const ProcessCall& call, bool is_direct, ProcessRank& self,
                const ProcessStaging& staging, cudaStream_t stream);

}  // namespace pyringar::cuda
