// engine: tensors in pieces, pieces in slots, slots into kernels.
//
// Tests     tests/cpp/cuda_processes, tests/test_cuda_processes.py

#include "cuda_process/engine.h"

#include <algorithm>

#include "core/schedule.h"
#include "cuda/folds.h"
#include "process/staged_counters.h"

namespace pyringar::cuda {

namespace {

// Tensors begin at multiples of this in a slot, so that 16-byte loads stay aligned.
constexpr std::size_t kTensorAlignment = 16;
// Slices begin at multiples of this.
constexpr std::size_t kSliceBytes = 256;

constexpr std::size_t pieces_of(std::size_t bytes, std::size_t piece_bytes) {
  return std::max<std::size_t>(1, (bytes + piece_bytes - 1) / piece_bytes);
}

// Tensors laid end to end in thought. Equal lists have equal lines on all ranks.
class TensorLine {
 public:
  explicit TensorLine(const std::vector<TensorSpan>& tensors) {
    for (const TensorSpan& tensor : tensors) {
      if (tensor.numel == 0) continue;
      const std::size_t begin =
          (bytes_ + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
      bytes_ = begin + tensor.bytes();
      tensors_.push_back({tensor, begin, bytes_});
    }
  }

  std::size_t bytes() const { return bytes_; }

  // visit(dtype, memory, offset in [begin, end), bytes) for what of each tensor lies there.
  template <typename Visit>
  void for_each(std::size_t begin, std::size_t end, Visit&& visit) const {
    const auto first = std::upper_bound(
        tensors_.begin(), tensors_.end(), begin,
        [](std::size_t position, const Placed& placed) { return position < placed.end; });
    for (auto placed = first; placed != tensors_.end() && placed->begin < end; ++placed) {
      const std::size_t from = std::max(begin, placed->begin);
      const std::size_t to = std::min(end, placed->end);
      visit(placed->tensor.dtype, placed->tensor.data + (from - placed->begin), from - begin,
            to - from);
    }
  }

 private:
  struct Placed {
    TensorSpan tensor;
    std::size_t begin;
    std::size_t end;
  };

  std::vector<Placed> tensors_;
  std::size_t bytes_ = 0;
};

// What every engine does alike: on the stream first, then on the host, and the other way round.
class StagedEngine : public StagedCounters {
 public:
  StagedEngine(const ProcessCall& call, ProcessRank& self, const ProcessStaging& staging,
               cudaStream_t stream)
      : StagedCounters(self),
        call_(call),
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
  void launch(const Folds& folds) const {
    folds.launch(staging_.device(), stream_, staging_.max_blocks());
  }

  const ProcessCall& call_;
  const ProcessStaging& staging_;
  const std::uint32_t base_;
  const cudaStream_t stream_;
  const int rank_;
};

// Tensors reduced in place. What is a rank's own it reads where it is, in its tensors.
class ReduceEngine : public StagedEngine {
 public:
  ReduceEngine(const ProcessCall& call, bool is_direct, ProcessRank& self,
               const ProcessStaging& staging, cudaStream_t stream)
      : StagedEngine(call, self, staging, stream), is_direct_(is_direct) {}

  std::size_t num_pieces() const { return pieces_of(line_.bytes(), staging_.plan().slot_bytes); }

  void copy_in(std::size_t piece, std::uint32_t n) const {
    if (world_size_ == 1) return;
    Folds copies = Folds::copies();
    if (!is_direct_) {
      add_copy_in(copies, piece, n, {begin(piece), end(piece)});
    } else {
      for (int owner = 0; owner < world_size_; ++owner) {
        if (owner != rank_) add_copy_in(copies, piece, n, slice(piece, owner));
      }
    }
    launch(copies);
  }
  void reduce(std::size_t piece, std::uint32_t n) const {
    fold(piece, n, slice(piece, rank_), /*into_slot=*/true);
  }
  void combine(std::size_t piece, std::uint32_t n) const {
    fold(piece, n, {begin(piece), end(piece)}, /*into_slot=*/false);
  }
  void copy_out(std::size_t piece, std::uint32_t n) const {
    Folds copies = Folds::copies();
    for (int owner = 0; owner < world_size_; ++owner) {
      if (owner == rank_) continue;
      const Range range = slice(piece, owner);
      const std::byte* from = slot(owner, n) + (range.begin - begin(piece));
      line_.for_each(range.begin, range.end,
                     [&](DType dtype, std::byte* tensor, std::size_t offset, std::size_t bytes) {
                       copies.add_copy(tensor, from + offset, bytes, dtype);
                     });
    }
    launch(copies);
  }

 private:
  std::size_t begin(std::size_t piece) const { return piece * staging_.plan().slot_bytes; }
  std::size_t end(std::size_t piece) const {
    return std::min(begin(piece) + staging_.plan().slot_bytes, line_.bytes());
  }
  Range slice(std::size_t piece, int owner) const {
    const std::size_t first = begin(piece);
    const std::size_t last = end(piece);
    // Ranks that share a GPU take turns there: one of them reduces all.
    if (staging_.plan().shares_gpu) return {first, owner == 0 ? last : first};
    const std::size_t blocks = (last - first + kSliceBytes - 1) / kSliceBytes;
    const Range range = chunk_range(blocks, world_size_, owner);
    return {std::min(first + range.begin * kSliceBytes, last),
            std::min(first + range.end * kSliceBytes, last)};
  }

  void add_copy_in(Folds& copies, std::size_t piece, std::uint32_t n, Range range) const {
    std::byte* to = own_slot(n) + (range.begin - begin(piece));
    line_.for_each(range.begin, range.end,
                   [&](DType dtype, std::byte* tensor, std::size_t offset, std::size_t bytes) {
                     copies.add_copy(to + offset, tensor, bytes, dtype);
                   });
  }

  void fold(std::size_t piece, std::uint32_t n, Range range, bool into_slot) const {
    Folds folds(call_.fold, world_size_, into_slot ? 2 : 1);
    std::vector<const std::byte*> sources(static_cast<std::size_t>(world_size_));
    const std::size_t in_slot = range.begin - begin(piece);
    line_.for_each(range.begin, range.end,
                   [&](DType dtype, std::byte* tensor, std::size_t offset, std::size_t bytes) {
                     for (int rank = 0; rank < world_size_; ++rank) {
                       sources[static_cast<std::size_t>(rank)] =
                           rank == rank_ ? tensor : slot(rank, n) + in_slot + offset;
                     }
                     const std::size_t numel = bytes / item_bytes(dtype);
                     if (into_slot) {
                       folds.add(dtype, sources, {tensor, own_slot(n) + in_slot + offset}, numel);
                     } else {
                       folds.add(dtype, sources, {tensor}, numel);
                     }
                   });
    launch(folds);
  }

  const bool is_direct_;
  const TensorLine line_{call_.outputs};
};

// Results that differ by rank. Slots hold, for every piece, the same part of each rank's share.
class ShareEngine : public StagedEngine {
 public:
  ShareEngine(const ProcessCall& call, ProcessRank& self, const ProcessStaging& staging,
              cudaStream_t stream)
      : StagedEngine(call, self, staging, stream),
        is_scatter_(call.kind == CallKind::kReduceScatter),
        share_(is_scatter_ ? call.outputs[0] : call.inputs[0]),
        part_bytes_(staging.plan().slot_bytes /
                    static_cast<std::size_t>(is_scatter_ ? world_size_ : 1) / kTensorAlignment *
                    kTensorAlignment) {}

  std::size_t num_pieces() const { return pieces_of(share_.bytes(), part_bytes_); }

  void copy_in(std::size_t piece, std::uint32_t n) const {
    Folds copies = Folds::copies();
    if (is_scatter_) {
      for (int rank = 0; rank < world_size_; ++rank) {
        if (rank == rank_) continue;
        copies.add_copy(own_slot(n) + part_of(rank), input() + share_of(rank) + begin(piece),
                        size(piece), share_.dtype);
      }
    } else if (call_.kind == CallKind::kAllGather || rank_ == call_.root) {
      copies.add_copy(own_slot(n), input() + begin(piece), size(piece), share_.dtype);
    }
    launch(copies);
  }
  void combine(std::size_t piece, std::uint32_t n) const {
    if (is_scatter_) return combine_share(piece, n);
    Folds copies = Folds::copies();
    if (call_.kind == CallKind::kAllGather) {
      for (int rank = 0; rank < world_size_; ++rank) {
        const std::byte* from = rank == rank_ ? input() + begin(piece) : slot(rank, n);
        copies.add_copy(output() + share_of(rank) + begin(piece), from, size(piece), share_.dtype);
      }
    } else if (rank_ != call_.root) {
      copies.add_copy(output() + begin(piece), slot(call_.root, n), size(piece), share_.dtype);
    }
    launch(copies);
  }

 private:
  void combine_share(std::size_t piece, std::uint32_t n) const {
    std::vector<const std::byte*> sources;
    for (int rank = 0; rank < world_size_; ++rank) {
      sources.push_back(rank == rank_ ? input() + share_of(rank) + begin(piece)
                                      : slot(rank, n) + part_of(rank_));
    }
    Folds folds(call_.fold, world_size_, 1);
    folds.add(share_.dtype, sources, {output() + begin(piece)},
              size(piece) / item_bytes(share_.dtype));
    launch(folds);
  }
  std::byte* input() const { return call_.inputs[0].data; }
  std::byte* output() const { return call_.outputs[0].data; }
  std::size_t begin(std::size_t piece) const { return piece * part_bytes_; }
  std::size_t size(std::size_t piece) const {
    return std::min(part_bytes_, share_.bytes() - begin(piece));
  }
  std::size_t share_of(int rank) const { return static_cast<std::size_t>(rank) * share_.bytes(); }
  std::size_t part_of(int rank) const { return static_cast<std::size_t>(rank) * part_bytes_; }

  const bool is_scatter_;
  const TensorSpan share_;
  const std::size_t part_bytes_;  // of one rank's share in a piece
};

// Nothing but words: all streams go on after all of them have come here.
class EmptyEngine : public StagedEngine {
 public:
  using StagedEngine::StagedEngine;
  std::size_t num_pieces() const { return 1; }
  void copy_in(std::size_t, std::uint32_t) const {}
  void combine(std::size_t, std::uint32_t) const {}
};

}  // namespace

bool run_staged(const ProcessCall& call, bool is_direct, ProcessRank& self,
                const ProcessStaging& staging, cudaStream_t stream) {
  const auto run = [&](auto engine) {
    const StagedProgram program{self.messages, engine.num_pieces()};
    self.messages += static_cast<std::uint32_t>(program.num_pieces);
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
  switch (call.kind) {
    case CallKind::kAllReduce:
      return run(ReduceEngine(call, is_direct, self, staging, stream));
    case CallKind::kBarrier:
      return run(EmptyEngine(call, self, staging, stream));
    default:
      return run(ShareEngine(call, self, staging, stream));
  }
}

}  // namespace pyringar::cuda
