// engine: one collective of one rank among processes with GPUs: what is enqueued, and when
// the host waits.
//
// Floor     cuda_process: host.
// Units     elements for spans, bytes for pieces and slots.
// Contract  Rank order, whatever the size and however it is cut; fp16 and bf16 are rounded once.
//           Everything is enqueued on the given stream, in order with what is there before and
//           after. The host waits until the others have enqueued theirs, through Board, and for no
//           device. Nothing of the caller's is written before Board::agree() has said yes on all
//           ranks. On false the board knows why; what has been enqueued by then still runs.
// Threads   one call at a time per staging.
// Source    core/staged_program.h, the program that processes without a GPU run
// Tests     tests/cpp/cuda_processes, tests/test_cuda_processes.py
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/collective.h"
#include "cuda_process/staging.h"

namespace pyringar::cuda {

// The host's side of core/staged_program.h: counters in memory that all processes share.
class Board {
 public:
  virtual ~Board() = default;
  virtual void announce(std::uint32_t n) = 0;
  virtual bool wait_announced(std::uint32_t n) = 0;  // of all ranks
  virtual void publish_reduced(std::uint32_t n) = 0;
  virtual bool wait_reduced(std::uint32_t n) = 0;
  virtual bool agree(std::uint32_t n) = 0;
};

// Elements side by side in the device's memory.
struct DeviceSpan {
  std::byte* data;
  std::size_t numel;
  DType dtype;
  std::size_t bytes() const { return numel * item_bytes(dtype); }
};

// Up to this, every rank reduces everything: one wait instead of two. Not measured yet.
inline constexpr std::size_t kExchangeBytes = 256 * 1024;

enum class StagedKind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kBarrier };

struct StagedCollective {
  StagedKind kind = StagedKind::kBarrier;
  bool is_direct = false;  // all_reduce: every rank its slice, else every rank everything
  Fold fold;
  int root = 0;
  // all_reduce, broadcast: inputs are the outputs. reduce_scatter: inputs[0] holds a part per rank,
  // outputs[0] one part. all_gather: the other way round.
  std::vector<DeviceSpan> inputs;
  std::vector<DeviceSpan> outputs;
};

// messages: of all calls before; counts those of this one.
bool run_staged(const StagedCollective& collective, const ProcessStaging& staging, Board& board,
                std::uint32_t& messages, cudaStream_t stream);

}  // namespace pyringar::cuda
