// process_call: runs the staged programs on host memory.
#include "process/process_call.h"

#include <algorithm>
#include <initializer_list>
#include <span>
#include <thread>

#include "cpu/kernels.h"
#include "process/staged_engines.h"

// Sanitizers do not see the memory accesses of inline assembly.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define PYRINGAR_SANITIZED 1
#endif
#elif defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define PYRINGAR_SANITIZED 1
#endif

namespace pyringar {

namespace {

void copy_from_slot(void* to, const void* from, std::size_t bytes) {
  kernels(DType::kUInt8, ReduceOp::kSum).fused(&from, 1, &to, 1, bytes, 1);
}

// `rep movsb` stores to cache lines that another core has read at 90 GB/s instead of 35 (AMD EPYC,
// Zen 5). It is slower for reading lines that another core has written.
void copy_to_slot(void* to, const void* from, std::size_t bytes) {
#if defined(__x86_64__) && !defined(PYRINGAR_SANITIZED)
  constexpr std::size_t kMinBytes = 16 * 1024;  // below this, `rep movsb` is slower
  if (bytes >= kMinBytes) {
    __asm__ __volatile__("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
    return;
  }
#endif
  copy_from_slot(to, from, bytes);
}

constexpr std::size_t kAheadStepBytes = 1024;

// Prefetch memory, which may lie behind the end of a tensor: prefetches cannot fault.
void read_ahead(const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kLineBytes = 64;
  for (std::size_t at = 0; at < bytes; at += kLineBytes) {
    __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(from) + at),
                       0, 2);
  }
}

// A batch of copies for staged_engines.h. add_copy() copies before it returns.
template <auto kCopy>
struct HostCopies {
  void add_copy(std::byte* to, const std::byte* from, std::size_t bytes, DType) const {
    kCopy(to, from, bytes);
  }
};

// A batch of folds for staged_engines.h. add() reduces before it returns. It prefetches memory
// `ahead` bytes beyond the destination; 0: no prefetch.
struct HostFolds {
  const Fold& fold;
  std::size_t ahead;

  void add(DType dtype, std::span<const void*> sources, std::initializer_list<void*> destinations,
           std::size_t numel) const {
    const FusedKernel kernel = fused_kernel(dtype, fold);
    const auto run = [&](void* const* to, std::size_t n) {
      kernel(sources.data(), static_cast<int>(sources.size()), to,
             static_cast<int>(destinations.size()), n, fold.divisor);
    };
    if (ahead == 0) return run(destinations.begin(), numel);
    const std::size_t step = kAheadStepBytes / item_bytes(dtype);
    auto* to = static_cast<std::byte*>(*destinations.begin());
    for (; numel > 0; to += kAheadStepBytes) {
      const std::size_t some = std::min(step, numel);
      read_ahead(to + ahead, some * item_bytes(dtype));
      void* const now[] = {to};
      run(now, some);
      for (const void*& source : sources) {
        source = static_cast<const std::byte*>(source) + kAheadStepBytes;
      }
      numel -= some;
    }
  }
};

// Host memory for staged_engines.h. Messages are in the slots of the segment, short messages in
// the payloads of message heads.
class HostMemory : public StagedCounters {
 public:
  static constexpr std::size_t kChunkAlignment = 64;

  HostMemory(ProcessRank& self, const Fold& fold, std::size_t max_bytes)
      : StagedCounters(self), fold_(fold), fits_head_(max_bytes <= MessageHead::kPayloadBytes) {}

 protected:
  std::byte* slot(int rank, std::uint32_t n) const {
    return fits_head_ ? segment_.head(rank, n).payload.data() : segment_.slot(rank, n);
  }
  std::byte* own_slot(std::uint32_t n) const { return slot(self_.rank, n); }
  Range slice_of(Range piece, int owner) const {
    return slice_in_units(piece, world_size_, owner, 64);
  }
  HostCopies<&copy_to_slot> to_slot() const { return {}; }
  HostCopies<&copy_from_slot> from_slot() const { return {}; }
  HostFolds folds(int, std::size_t ahead) const { return {fold_, ahead}; }
  template <typename Batch>
  void launch(const Batch&) const {}

 private:
  const Fold& fold_;
  const bool fits_head_;
};

template <class Engine>
bool exchange(Engine& engine, ProcessRank& self, std::size_t num_pieces) {
  const StagedProgram program{self.messages, num_pieces};
  return self.count_messages(program, run_staged_exchange(engine, program));
}

std::size_t piece_bytes_for(std::size_t bytes, const Segment& segment) {
  const std::size_t most = segment.world_size() == 2 ? kPieceBytesOfTwo
                           : bytes <= kSlotBytes     ? kSlotBytes
                                                     : kPieceBytes;
  const std::size_t num_pieces = pieces_of(bytes, most);
  return std::max<std::size_t>(64, (bytes + 64 * num_pieces - 1) / (64 * num_pieces) * 64);
}

ProcessAlgorithm staged_algorithm(std::size_t bytes, const Segment& segment) {
  const bool is_exchange = segment.world_size() <= 2 || bytes <= kExchangeBytes;
  return is_exchange ? ProcessAlgorithm::kExchange : ProcessAlgorithm::kDirect;
}

bool run_all_reduce(const Collective& call, ProcessRank& self) {
  self.flat.view(call);
  const std::size_t bytes = self.flat.bytes();
  const std::size_t piece_bytes = piece_bytes_for(bytes, self.segment);
  const std::size_t num_pieces = pieces_of(bytes, piece_bytes);
  const bool is_direct = algorithm_of(call, self.segment) == ProcessAlgorithm::kDirect;
  ReduceEngine engine(HostMemory(self, call.fold, bytes), is_direct, piece_bytes);
  if (!is_direct) return exchange(engine, self, num_pieces);
  const StagedProgram program{self.messages, num_pieces};
  return self.count_messages(program, run_staged_direct(engine, program));
}

bool run_chunked(const Collective& call, ProcessRank& self) {
  const bool is_scatter = call.kind == CallKind::kReduceScatter;
  const std::size_t most_bytes = is_scatter ? kSlotBytes : call.local_source(0).bytes();
  ChunkEngine engine(HostMemory(self, call.fold, most_bytes), call, kSlotBytes);
  return exchange(engine, self, engine.num_pieces());
}

bool move_data(const Collective& call, ProcessRank& self) {
  if (call.kind == CallKind::kAllReduce) return run_all_reduce(call, self);
  if (call.kind != CallKind::kBarrier) return run_chunked(call, self);
  EmptyEngine engine(HostMemory(self, call.fold, 0));
  return exchange(engine, self, 1);
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

void ProcessRank::sleep_in(Phase phase) {
  if (delay.phase != phase || delay.delay <= delay.delay.zero()) return;
  watch.before_wait();
  const auto time = delay.delay;
  delay = {};
  std::this_thread::sleep_for(time);
}

bool ProcessRank::count_messages(const StagedProgram& program, bool is_done) {
  messages = program.base +
             (layouts_differ ? kMaxRefused : static_cast<std::uint32_t>(program.num_pieces));
  return is_done;
}

ProcessAlgorithm algorithm_of(const Collective& call, const Segment& segment) {
  return call.kind == CallKind::kAllReduce ? staged_algorithm(call.bytes, segment)
                                           : ProcessAlgorithm::kExchange;
}

ProcessPlan plan_all_reduce(std::size_t bytes, const Segment& segment) {
  return {staged_algorithm(bytes, segment), pieces_of(bytes, piece_bytes_for(bytes, segment))};
}

CallRecord record_of(const Collective& call, const Segment& segment) {
  CallRecord record;
  record.kind = call.kind;
  record.op = call.fold.op;
  record.divisor = static_cast<std::uint16_t>(call.fold.divisor);
  record.order = call.fold.order;
  if (call.kind == CallKind::kBroadcast) record.root = segment.line(call.root).global_rank;
  record.num_tensors = static_cast<std::uint32_t>(call.tensors.size());
  record.strides = call.remote.strides;
  record.shapes = call.remote.shapes;
  call.remote.what.copy(record.what.data(), record.what.size() - 1);
  for (std::size_t i = 0; i < call.tensors.size(); ++i) {
    const TensorSpan tensor = call.local_destination(i);
    if (i == 0) record.dtype = tensor.dtype;
    record.numel += tensor.numel;
    record.shapes =
        mix(record.shapes, tensor.numel * kNumDTypes + static_cast<std::size_t>(tensor.dtype));
  }
  return record;
}

void begin_call(const Collective& call, ProcessRank& self, bool is_background) {
  self.sequence += 1;
  CallRecord& record = self.segment.line(self.rank).calls[self.sequence % 2];
  record = record_of(call, self.segment);
  record.sequence = self.sequence;
  self.call_digest = record.digest();
  self.layouts_differ = false;
  self.watch.begin_call(is_background);
}

bool run_process_call(const Collective& call, ProcessRank& self, bool is_background) {
  const auto progressed = [&] { self.watch.progressed(); };
  for (const PackedTensor& tensor : call.packed) {
    if (tensor.is_input) pack(tensor.view, tensor.dense.get(), progressed);
  }
  begin_call(call, self, is_background);
  if (!move_data(call, self)) return false;
  for (const PackedTensor& tensor : call.packed) {
    if (tensor.is_output) unpack(tensor.dense.get(), tensor.view, progressed);
  }
  return true;
}

Collective in_index_order(const Collective& call) {
  Collective ordered = call.copy();
  ordered.remote.strides = 0;
  ordered.remote.permuted.clear();
  for (const RemoteCall::Permuted& permuted : call.remote.permuted) {
    const Buffers& tensor = ordered.tensors[permuted.tensor];
    std::shared_ptr<std::byte[]> dense = std::make_unique_for_overwrite<std::byte[]>(
        call.local_destination(permuted.tensor).bytes());
    ordered.pointers[ordered.index_of(tensor.destinations)] = dense.get();
    ordered.packed.push_back({permuted.view, std::move(dense), true, permuted.is_output});
  }
  return ordered;
}

}  // namespace pyringar
