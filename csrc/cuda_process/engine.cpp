// engine: the memory of a GPU for the engines of process/staged_engines.h.

#include "cuda_process/engine.h"

#include "cuda/folds.h"
#include "process/staged_engines.h"

namespace pyringar::cuda {

namespace {

// Slices begin at multiples of this.
constexpr std::size_t kSliceBytes = 256;

// Slots on GPUs. Writes go to the stream first, then to the host; waits the other way round.
class StreamMemory : public StagedCounters {
 public:
  static constexpr std::size_t kPartAlignment = 16;

  StreamMemory(const Fold& fold, ProcessRank& self, const ProcessStaging& staging,
               cudaStream_t stream)
      : StagedCounters(self),
        fold_(fold),
        staging_(staging),
        base_(self.messages),
        stream_(stream),
        rank_(self.rank) {}

  void announce(std::uint32_t n) {
    staging_.write_announced(n, stream_);
    StagedCounters::announce(n);
  }
  bool wait_announced(std::uint32_t n) {
    if (!StagedCounters::wait_announced(n)) return false;
    staging_.await_announced(n, stream_);
    return true;
  }
  void publish_reduced(std::uint32_t n) {
    if (n != base_) staging_.write_reduced(n, stream_);  // else the host brings its own up
    StagedCounters::publish_reduced(n);
  }
  bool wait_reduced(std::uint32_t n) {
    if (!StagedCounters::wait_reduced(n)) return false;
    staging_.await_reduced(n, stream_);
    return true;
  }

 protected:
  std::byte* slot(int rank, std::uint32_t n) const { return staging_.slot(rank, n); }
  std::byte* own_slot(std::uint32_t n) const { return slot(rank_, n); }
  Range slice_of(Range piece, int owner) const {
    const auto [first, last] = piece;
    // Ranks that share a GPU take turns there: one of them reduces all.
    if (staging_.plan().shares_gpu) return {first, owner == 0 ? last : first};
    return slice_in_units(piece, world_size_, owner, kSliceBytes);
  }
  Folds to_slot() const { return Folds::copies(); }
  Folds from_slot() const { return Folds::copies(); }
  Folds folds(int num_destinations, std::size_t) const {
    return {fold_, world_size_, num_destinations};
  }
  void launch(const Folds& folds) const {
    folds.launch(staging_.device(), stream_, staging_.max_blocks());
  }

 private:
  const Fold& fold_;
  const ProcessStaging& staging_;
  const std::uint32_t base_;
  const cudaStream_t stream_;
  const int rank_;
};

}  // namespace

bool run_staged(const Collective& call, bool is_direct, ProcessRank& self,
                const ProcessStaging& staging, cudaStream_t stream) {
  const StreamMemory memory(call.fold, self, staging, stream);
  const std::size_t slot_bytes = staging.plan().slot_bytes;
  const auto run = [&](auto engine, std::size_t num_pieces) {
    const StagedProgram program{self.messages, num_pieces};
    self.messages += static_cast<std::uint32_t>(num_pieces);
    StagedCall staged(staging, self.messages, stream);
    bool is_done = false;
    if constexpr (requires { engine.reduce(0, 0); }) {
      is_done =
          is_direct ? run_staged_direct(engine, program) : run_staged_exchange(engine, program);
    } else {
      is_done = run_staged_exchange(engine, program);
    }
    staged.end();
    return is_done;
  };
  if (call.kind == CallKind::kBarrier) return run(EmptyEngine(memory), 1);
  if (call.kind != CallKind::kAllReduce) {
    const ShareEngine shares(memory, call, slot_bytes);
    return run(shares, shares.num_pieces());
  }
  self.line.view(call);
  return run(ReduceEngine(memory, is_direct, slot_bytes), pieces_of(self.line.bytes(), slot_bytes));
}

}  // namespace pyringar::cuda
