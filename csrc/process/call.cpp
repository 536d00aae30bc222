// call: the engines that give the staged programs a process's memory and arithmetic.
//
// Tests     tests/conformance/test_bits.py, tests/cpp/process_test.cpp

#include "process/call.h"

#include <algorithm>
#include <thread>

#include "core/error.h"
#include "cpu/copy.h"
#include "cpu/fused.h"
#include "cpu/kernels.h"
#include "process/staged_counters.h"

namespace pyringar {

namespace {

constexpr std::size_t kAheadStepBytes = 1024;

// Touches nothing: any address will do.
void read_ahead(const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kLineBytes = 64;
  for (std::size_t at = 0; at < bytes; at += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(from) + at),
                       0, 2);
  }
}

// What the engines here keep of a call.
class StagedEngine : public StagedCounters {
 public:
  // most_bytes: that a message has.
  StagedEngine(ProcessRank& self, const ProcessCall& call, std::size_t most_bytes = 0)
      : StagedCounters(self), call_(call), fits_head_(most_bytes <= MessageHead::kPayloadBytes) {}

 protected:
  std::byte* slot(int rank, std::uint32_t n) const {
    return fits_head_ ? segment_.head(rank, n).payload.data() : segment_.slot(rank, n);
  }
  std::byte* own_slot(std::uint32_t n) const { return slot(self_.rank, n); }

  const ProcessCall& call_;
  const bool fits_head_;
};

// Tensors reduced in place, through slots: every rank its slice of every piece, or all of it. What
// is a rank's own it reads where it is, in its tensors.
class ReduceEngine : public StagedEngine {
 public:
  ReduceEngine(ProcessRank& self, const ProcessCall& call, std::size_t piece_bytes, bool is_direct)
      : StagedEngine(self, call, self.line.bytes()),
        line_(self.line),
        piece_bytes_(piece_bytes),
        is_direct_(is_direct),
        sources_(self.sources) {
    sources_.resize(static_cast<std::size_t>(world_size_));
  }

  void copy_in(std::size_t piece, std::uint32_t n) {
    if (!is_direct_) return copy_part_in(piece, n, begin(piece), end(piece));
    for_each_slice(piece, [&](int owner, DType, std::size_t first, std::size_t last) {
      if (owner != self_.rank) copy_part_in(piece, n, first, last);
    });
  }
  void reduce(std::size_t piece, std::uint32_t n) {
    for_each_slice(piece, [&](int owner, DType dtype, std::size_t first, std::size_t last) {
      if (owner != self_.rank) return;
      line_.for_each_tensor(first, last,
                            [&](std::byte* tensor, std::size_t offset, std::size_t bytes) {
                              const std::size_t at = first - begin(piece) + offset;
                              fuse(n, at, tensor, dtype, bytes, {tensor, own_slot(n) + at});
                            });
    });
  }
  void copy_out(std::size_t piece, std::uint32_t n) {
    for_each_slice(piece, [&](int owner, DType, std::size_t first, std::size_t last) {
      if (owner == self_.rank) return;
      const std::byte* from = slot(owner, n) + (first - begin(piece));
      line_.for_each_tensor(first, last,
                            [&](std::byte* tensor, std::size_t offset, std::size_t bytes) {
                              copy_from_slot(tensor, from + offset, bytes);
                            });
    });
  }
  void combine(std::size_t piece, std::uint32_t n) {
    self_.sleep_in(Phase::kGather);
    line_.for_each_run(
        begin(piece), end(piece), [&](DType dtype, std::size_t at, std::size_t numel) {
          const std::size_t first = begin(piece) + at;
          line_.for_each_tensor(first, first + numel * item_bytes(dtype),
                                [&](std::byte* tensor, std::size_t offset, std::size_t bytes) {
                                  combine_part(piece, n, at + offset, tensor, dtype, bytes);
                                });
        });
  }

 private:
  std::size_t begin(std::size_t piece) const { return piece * piece_bytes_; }
  std::size_t end(std::size_t piece) const {
    return std::min(begin(piece) + piece_bytes_, line_.bytes());
  }

  // visit(owner, dtype, first, last): bytes of the line, the slices of each run of a piece.
  template <typename Visit>
  void for_each_slice(std::size_t piece, Visit&& visit) const {
    line_.for_each_run(begin(piece), end(piece),
                       [&](DType dtype, std::size_t at, std::size_t numel) {
                         const std::size_t item = item_bytes(dtype);
                         for (int owner = 0; owner < world_size_; ++owner) {
                           const Range slice = chunk_range(numel, world_size_, owner);
                           if (slice.size() == 0) continue;
                           const std::size_t first = begin(piece) + at + slice.begin * item;
                           visit(owner, dtype, first, first + slice.size() * item);
                         }
                       });
  }

  void copy_part_in(std::size_t piece, std::uint32_t n, std::size_t first, std::size_t last) {
    std::byte* to = own_slot(n) + (first - begin(piece));
    line_.for_each_tensor(first, last,
                          [&](std::byte* tensor, std::size_t offset, std::size_t bytes) {
                            copy_to_slot(to + offset, tensor, bytes);
                          });
  }

  void combine_part(std::size_t piece, std::uint32_t n, std::size_t at, std::byte* tensor,
                    DType dtype, std::size_t bytes) {
    // The piece that is copied in next; this one and the one after it are in their slots already.
    const std::size_t ahead = 2 * piece_bytes_;
    const bool reads_ahead =
        line_.bytes() >= kReadsAheadBytes && end(piece) + ahead <= line_.bytes();
    const std::size_t step = reads_ahead ? kAheadStepBytes : bytes;
    for (std::size_t done = 0; done < bytes; done += step) {
      const std::size_t some = std::min(step, bytes - done);
      if (reads_ahead) read_ahead(tensor + done + ahead, some);
      fuse(n, at + done, tensor + done, dtype, some, {tensor + done});
    }
  }

  // own: this rank's part; the others' lies at `at` of their slots.
  void fuse(std::uint32_t n, std::size_t at, const std::byte* own, DType dtype, std::size_t bytes,
            std::initializer_list<void*> results) {
    for (int rank = 0; rank < world_size_; ++rank) {
      sources_[static_cast<std::size_t>(rank)] = rank == self_.rank ? own : slot(rank, n) + at;
    }
    fused_kernel(dtype, call_.fold)(sources_.data(), world_size_, results.begin(),
                                    static_cast<int>(results.size()), bytes / item_bytes(dtype),
                                    call_.fold.divisor);
  }

  const FlatView& line_;
  const std::size_t piece_bytes_;
  const bool is_direct_;
  std::vector<const void*>& sources_;
};

// Results that differ by rank. Slots hold, for every piece, the same part of each rank's share.
class ShareEngine : public StagedEngine {
 public:
  ShareEngine(ProcessRank& self, const ProcessCall& call, std::size_t share_bytes,
              std::size_t part_bytes)
      : StagedEngine(self, call, call.kind == CallKind::kReduceScatter ? part_bytes : share_bytes),
        share_bytes_(share_bytes),
        part_bytes_(part_bytes) {}

  void copy_in(std::size_t piece, std::uint32_t n) {
    switch (call_.kind) {
      case CallKind::kReduceScatter:
        for (int rank = 0; rank < world_size_; ++rank) {
          copy_to_slot(own_slot(n) + part_of(rank), input() + share_of(rank) + begin(piece),
                       size(piece));
        }
        return;
      case CallKind::kAllGather:
        return copy_to_slot(own_slot(n), input() + begin(piece), size(piece));
      case CallKind::kBroadcast:
        if (self_.rank == call_.root) {
          copy_to_slot(own_slot(n), input() + begin(piece), size(piece));
        }
        return;
      default:
        return;
    }
  }
  void combine(std::size_t piece, std::uint32_t n) {
    switch (call_.kind) {
      case CallKind::kReduceScatter:
        return combine_share(piece, n);
      case CallKind::kAllGather:
        for (int rank = 0; rank < world_size_; ++rank) {
          copy_from_slot(output() + share_of(rank) + begin(piece), slot(rank, n), size(piece));
        }
        return;
      case CallKind::kBroadcast:
        if (self_.rank != call_.root) {
          copy_from_slot(output() + begin(piece), slot(call_.root, n), size(piece));
        }
        return;
      default:
        return;
    }
  }

 private:
  void combine_share(std::size_t piece, std::uint32_t n) {
    const DType dtype = call_.outputs[0].dtype;
    std::vector<const void*> sources;
    for (int rank = 0; rank < world_size_; ++rank) {
      sources.push_back(slot(rank, n) + part_of(self_.rank));
    }
    void* result = output() + begin(piece);
    fused_kernel(dtype, call_.fold)(sources.data(), world_size_, &result, 1,
                                    size(piece) / item_bytes(dtype), call_.fold.divisor);
  }
  std::byte* input() const { return call_.inputs[0].data; }
  std::byte* output() const { return call_.outputs[0].data; }
  std::size_t begin(std::size_t piece) const { return piece * part_bytes_; }
  std::size_t size(std::size_t piece) const {
    return std::min(part_bytes_, share_bytes_ - begin(piece));
  }
  std::size_t share_of(int rank) const { return static_cast<std::size_t>(rank) * share_bytes_; }
  std::size_t part_of(int rank) const { return static_cast<std::size_t>(rank) * part_bytes_; }

  const std::size_t share_bytes_;
  const std::size_t part_bytes_;  // of one rank's share in a piece
};

// Moves no data: for barriers.
class EmptyEngine : public StagedEngine {
 public:
  using StagedEngine::StagedEngine;
  void copy_in(std::size_t, std::uint32_t) {}
  void combine(std::size_t, std::uint32_t) {}
};

template <class Engine>
bool exchange(Engine& engine, ProcessRank& self, std::size_t num_pieces) {
  const StagedProgram program{self.messages, num_pieces};
  return self.count_messages(program, run_staged_exchange(engine, program));
}

template <class Engine>
bool direct(Engine& engine, ProcessRank& self, std::size_t num_pieces) {
  const StagedProgram program{self.messages, num_pieces};
  return self.count_messages(program, run_staged_direct(engine, program));
}

std::size_t pieces_of(std::size_t bytes, std::size_t piece_bytes) {
  return std::max<std::size_t>(1, (bytes + piece_bytes - 1) / piece_bytes);
}

// Pieces of one size.
std::size_t piece_bytes_for(std::size_t bytes, const Segment& segment) {
  const std::size_t most = segment.world_size() == 2       ? kPieceBytesOfTwo
                           : bytes <= segment.slot_bytes() ? segment.slot_bytes()
                                                           : kPieceBytes;
  const std::size_t num_pieces = pieces_of(bytes, std::min(most, segment.slot_bytes()));
  return std::max<std::size_t>(64, (bytes + 64 * num_pieces - 1) / (64 * num_pieces) * 64);
}

ProcessAlgorithm staged_algorithm(std::size_t bytes, const Segment& segment) {
  const bool is_exchange = segment.world_size() == 2 || bytes <= kExchangeBytes;
  return is_exchange ? ProcessAlgorithm::kExchange : ProcessAlgorithm::kDirect;
}

bool run_all_reduce(const ProcessCall& call, ProcessRank& self, ProcessAlgorithm algorithm) {
  self.line.view(call.outputs);
  const std::size_t piece_bytes = piece_bytes_for(self.line.bytes(), self.segment);
  const std::size_t num_pieces = pieces_of(self.line.bytes(), piece_bytes);
  const bool is_direct = algorithm == ProcessAlgorithm::kDirect;
  ReduceEngine engine(self, call, piece_bytes, is_direct);
  return is_direct ? direct(engine, self, num_pieces) : exchange(engine, self, num_pieces);
}

bool run_shares(const ProcessCall& call, ProcessRank& self) {
  const bool is_scatter = call.kind == CallKind::kReduceScatter;
  const TensorSpan& share = is_scatter ? call.outputs[0] : call.inputs[0];
  const std::size_t parts = is_scatter ? static_cast<std::size_t>(self.segment.world_size()) : 1;
  const std::size_t part_bytes = self.segment.slot_bytes() / parts / 64 * 64;
  ShareEngine engine(self, call, share.bytes(), part_bytes);
  return exchange(engine, self, pieces_of(share.bytes(), part_bytes));
}

// visit(part, where it lies in the dense copy)
template <typename Visit>
void for_each_dense_part(const PackedTensor& tensor, ProcessRank& self, Visit&& visit) {
  const std::size_t item = tensor.view.item;
  std::byte* dense = tensor.dense.get();
  for_each_part(tensor.view, kProgressBytes / item, [&](const StridedView& part) {
    visit(part, dense);
    dense += num_elems(part) * item;
    self.watch.progressed();
  });
}

}  // namespace

const char* process_algorithm_name(ProcessAlgorithm algorithm) {
  constexpr const char* kNames[kNumProcessAlgorithms] = {"exchange", "direct"};
  return kNames[static_cast<int>(algorithm)];
}

const char* phase_name(Phase phase) {
  constexpr const char* kNames[kNumPhases] = {"idle", "announce", "reduce", "gather"};
  return kNames[static_cast<int>(phase)];
}

std::size_t ProcessCall::bytes() const {
  std::size_t bytes = 0;
  for (const TensorSpan& tensor : kind == CallKind::kReduceScatter ? inputs : outputs) {
    bytes += tensor.bytes();
  }
  return bytes;
}

void ProcessRank::sleep_in(Phase phase) {
  if (delay.phase != phase || delay.delay <= delay.delay.zero()) return;
  watch.before_wait();
  const auto time = delay.delay;
  delay = {};  // once
  std::this_thread::sleep_for(time);
}

bool ProcessRank::count_messages(const StagedProgram& program, bool is_done) {
  messages = program.base +
             (lies_otherwise ? kMostRefused : static_cast<std::uint32_t>(program.num_pieces));
  return is_done;
}

ProcessAlgorithm algorithm_of(const ProcessCall& call, const Segment& segment) {
  if (call.kind != CallKind::kAllReduce || segment.world_size() == 1) {
    return ProcessAlgorithm::kExchange;
  }
  return staged_algorithm(call.bytes(), segment);
}

ProcessPlan plan_all_reduce(std::size_t bytes, const Segment& segment) {
  const bool is_alone = segment.world_size() == 1;
  return {is_alone ? ProcessAlgorithm::kExchange : staged_algorithm(bytes, segment),
          pieces_of(bytes, piece_bytes_for(bytes, segment))};
}

CallRecord ProcessCall::record() const {
  CallRecord record;
  record.kind = kind;
  record.op = fold.op;
  record.divisor = static_cast<std::uint16_t>(fold.divisor);
  record.order = fold.order;
  record.root = root;
  record.num_tensors = static_cast<std::uint32_t>(outputs.size());
  record.strides = strides;
  record.shapes = shapes;
  if (!outputs.empty()) record.dtype = outputs[0].dtype;
  for (const TensorSpan& tensor : outputs) {
    record.numel += tensor.numel;
    record.shapes =
        mix(record.shapes, tensor.numel * kNumDTypes + static_cast<std::size_t>(tensor.dtype));
  }
  return record;
}

void begin_call(const ProcessCall& call, ProcessRank& self, bool is_background,
                Clock::time_point now) {
  self.sequence += 1;
  CallRecord& record = self.segment.line(self.rank).calls[self.sequence % 2];
  record = call.record();
  record.sequence = self.sequence;
  self.call_digest = record.digest();
  self.lies_otherwise = false;
  self.watch.begin_call(is_background, now);
}

void pack_inputs(const ProcessCall& call, ProcessRank& self) {
  for (const PackedTensor& tensor : call.packed) {
    if (tensor.is_input) for_each_dense_part(tensor, self, &pack);
  }
}

void unpack_outputs(const ProcessCall& call, ProcessRank& self) {
  const auto unpack_part = [](const StridedView& part, const std::byte* dense) {
    unpack(dense, part);
  };
  for (const PackedTensor& tensor : call.packed) {
    if (tensor.is_output) for_each_dense_part(tensor, self, unpack_part);
  }
}

bool run_process_call(const ProcessCall& call, ProcessRank& self, bool is_background,
                      Clock::time_point now) {
  begin_call(call, self, is_background, now);
  if (call.kind == CallKind::kAllReduce) {
    return run_all_reduce(call, self, algorithm_of(call, self.segment));
  }
  if (call.kind != CallKind::kBarrier) return run_shares(call, self);
  EmptyEngine engine(self, call);
  return exchange(engine, self, 1);
}

ProcessCall in_index_order(const ProcessCall& call) {
  ProcessCall ordered = call;
  ordered.strides = 0;
  ordered.permuted.clear();
  for (const ProcessCall::Permuted& permuted : call.permuted) {
    TensorSpan& span = ordered.outputs[permuted.output];
    std::shared_ptr<std::byte[]> dense = std::make_unique_for_overwrite<std::byte[]>(span.bytes());
    span.data = dense.get();
    ordered.packed.push_back({permuted.view, std::move(dense), true, permuted.is_output});
  }
  if (call.kind == CallKind::kBroadcast) ordered.inputs = ordered.outputs;
  return ordered;
}

}  // namespace pyringar
