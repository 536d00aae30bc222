// ring: runs core/ring_program.h on thread blocks, with slots in the next rank's memory.
//
// Contract  One block per local rank and channel, all resident at once (cooperative launch).
//           Channel c of C takes pieces c, c + C, ... of every chunk, through separate slots and
//           flags. So elements are added in the order of the CPU ring. Slots and flag are in the
//           reader's memory, and `taken` is in the writer's. Ranks on one device read each other's
//           inputs and results in place (cpu/ring.cpp explains why these stay unchanged). Only
//           partial sums go through slots. Between devices all data goes through slots. Element i
//           of a piece is at index shift + i of its slot, so that slots are aligned as tensors.
// Tests     tests/cpp/cuda/ring_kernel_test.cpp under ThreadSanitizer, tests/cuda;
//           tests/build/test_cuda_kernels.py reads registers and loads in flight
#pragma once

#include "cuda/flag.cuh"
#include "cuda/ring_jobs.cuh"

namespace pyringar::cuda {

PYRINGAR_DEVICE inline int prev_of(const RingProgram& program) {
  return (program.rank + program.world_size - 1) % program.world_size;
}

// One block's arguments. They are in shared memory to save registers.
struct RingShared {
  struct RankTensor {
    const void* input;
    void* output;
    // Index of the tensor's first element: the chunk's begin if the tensor is one chunk, else 0.
    std::size_t first_input;
    std::size_t first_output;
  };
  RingProgram program;
  RingCut cut;
  RingPorts ports;  // pointers to the block's channel
  RankTensor own;
  RankTensor prev;      // valid if the previous rank is on this device
  Range first_of_prev;  // first chunk that the previous rank sends
  MemoryScope scope;

  PYRINGAR_DEVICE bool sees_prev() const { return ports.prev_local >= 0; }
  PYRINGAR_DEVICE bool sees_next() const { return ports.next_local >= 0; }

  PYRINGAR_DEVICE void fill(const RingArgs& args, int local, int channel) {
    const std::size_t slots = static_cast<std::size_t>(channel) * args.num_slots * args.slot_bytes;
    const std::size_t flags = static_cast<std::size_t>(channel) * kFlagStride;
    ports = args.ports[local];
    ports.in_slots += slots;
    ports.out_slots += slots;
    for (const std::uint32_t** flag : {&ports.in_flag, &ports.out_taken}) *flag += flags;
    for (std::uint32_t** flag : {&ports.out_flag, &ports.in_taken, &ports.base}) *flag += flags;
    own = tensor(args, local);
    if (sees_prev()) prev = tensor(args, ports.prev_local);
    scope = sees_prev() && sees_next() ? MemoryScope::kDevice : MemoryScope::kSystem;
    program = {args.rank[local],
               args.world_size,
               args.numel,
               args.piece_elems,
               args.phases,
               load_acquire(ports.base),
               static_cast<std::size_t>(channel),
               static_cast<std::size_t>(args.num_channels)};
    cut = ring_cut(program);
    first_of_prev = cut.chunks[ring_step(prev_of(program), args.world_size, 0).send_chunk];
  }

 private:
  static PYRINGAR_DEVICE RankTensor tensor(const RingArgs& args, int local) {
    const std::size_t chunk = chunk_range(args.numel, args.world_size, args.rank[local]).begin;
    return {args.input[local], args.output[local],
            args.phases == RingPhases::kAllGather ? chunk : 0,
            args.phases == RingPhases::kReduceScatter ? chunk : 0};
  }
};

// The sources and destinations of one message.
template <typename E>
class RingMove {
 public:
  using Element = typename E::Element;
  using Partial = typename E::Partial;
  static constexpr int kPackElems = kPackBytes / static_cast<int>(sizeof(Element));
  enum class Kind { kNothing, kWiden, kAdd, kFinish, kCopy };

  Kind kind = Kind::kNothing;
  bool receives_input = false;     // `received` holds elements of prev's input, not partial sums
  const void* received = nullptr;  // in prev's tensors or in a slot of this rank
  const Element* own = nullptr;    // in this rank's input, or the source of a copy
  Element* kept = nullptr;         // in this rank's output; null: not written
  void* sent = nullptr;            // in a slot of the next rank; null: not sent
  bool is_shared = true;           // neighbor blocks access the data, so their flags need a fence

  PYRINGAR_DEVICE RingMove(const RingArgs& args, const RingShared& shared)
      : args_(args), shared_(shared) {}

  PYRINGAR_DEVICE void send_own(Range range, std::uint32_t n_out) {
    if (shared_.sees_next()) return;
    kind = Kind::kWiden;
    own = input(shared_.own, range);
    sent = out_slot<Partial>(n_out, range);
  }
  PYRINGAR_DEVICE void reduce_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    add(Kind::kAdd, range, n_in);
    sent = out_slot<Partial>(n_out, range);
  }
  PYRINGAR_DEVICE void reduce_finish(Range range, std::uint32_t n_in) {
    add(Kind::kFinish, range, n_in);
    kept = output(shared_.own, range);
  }
  PYRINGAR_DEVICE void reduce_finish_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    reduce_finish(range, n_in);
    send_result(range, n_out);
  }
  PYRINGAR_DEVICE void gather_own(Range range, std::uint32_t n_out) {
    kind = Kind::kCopy;
    own = input(shared_.own, range);
    kept = output(shared_.own, range);
    send_result(range, n_out);
  }
  PYRINGAR_DEVICE void copy_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    copy_last(range, n_in);
    is_shared = true;
    send_result(range, n_out);
  }
  PYRINGAR_DEVICE void copy_last(Range range, std::uint32_t n_in) {
    kind = Kind::kCopy;
    own = shared_.sees_prev() ? output(shared_.prev, range) : in_slot<Element>(n_in, range);
    kept = output(shared_.own, range);
    is_shared = !shared_.sees_prev();
  }

 private:
  using RankTensor = RingShared::RankTensor;
  static PYRINGAR_DEVICE const Element* input(const RankTensor& tensor, Range range) {
    return static_cast<const Element*>(tensor.input) + (range.begin - tensor.first_input);
  }
  static PYRINGAR_DEVICE Element* output(const RankTensor& tensor, Range range) {
    return static_cast<Element*>(tensor.output) + (range.begin - tensor.first_output);
  }
  template <typename T>
  PYRINGAR_DEVICE std::size_t slot_offset(std::uint32_t n, Range range) const {
    return std::size_t{n % args_.num_slots} * args_.slot_bytes +
           range.begin % kPackElems * sizeof(T);
  }
  template <typename T>
  PYRINGAR_DEVICE const T* in_slot(std::uint32_t n, Range range) const {
    return reinterpret_cast<const T*>(shared_.ports.in_slots + slot_offset<T>(n, range));
  }
  template <typename T>
  PYRINGAR_DEVICE T* out_slot(std::uint32_t n, Range range) const {
    return reinterpret_cast<T*>(shared_.ports.out_slots + slot_offset<T>(n, range));
  }
  PYRINGAR_DEVICE void add(Kind how, Range range, std::uint32_t n_in) {
    kind = how;
    own = input(shared_.own, range);
    // The first chunk that the previous rank sends holds its input, not partial sums.
    const Range first = shared_.first_of_prev;
    receives_input = shared_.sees_prev() && first.begin <= range.begin && range.begin < first.end;
    received = in_slot<Partial>(n_in, range);
    if (receives_input) received = input(shared_.prev, range);
  }
  PYRINGAR_DEVICE void send_result(Range range, std::uint32_t n_out) {
    if (!shared_.sees_next()) sent = out_slot<Element>(n_out, range);
  }

  const RingArgs& args_;
  const RingShared& shared_;
};

template <typename E, typename Op>
class BlockRing {
 public:
  using Element = typename E::Element;
  using Partial = typename E::Partial;

  PYRINGAR_DEVICE BlockRing(const RingArgs& args, const RingShared& shared)
      : args_(args), shared_(shared) {}

  PYRINGAR_DEVICE bool wait_message(std::uint32_t n, int action) const {
    return block_wait(shared_.ports.in_flag, shared_.scope, n, action - 1, args_.patience,
                      [&](Failure& failure) {
                        failure.rank = shared_.program.rank;
                        failure.peer = prev_of(shared_.program);
                        failure.step = action - 1;
                        failure.what = Awaited::kMessage;
                      });
  }
  // Its timeout is after all of wait_message(), so that a missing message is reported first.
  PYRINGAR_DEVICE bool wait_slot(std::uint32_t n, int action) const {
    const bool is_partial = 0 < action && action < args_.world_size - 1;
    if (shared_.sees_next() && !is_partial) return true;  // no slot: the next rank reads in place
    const std::uint32_t wanted = n - args_.num_slots;
    const int step = 2 * args_.world_size + action;
    return block_wait(shared_.ports.out_taken, shared_.scope, wanted, step, args_.patience,
                      [&](Failure& failure) {
                        failure.rank = shared_.program.rank;
                        failure.peer = (shared_.program.rank + 1) % args_.world_size;
                        failure.step = action;
                        failure.what = Awaited::kSlot;
                      });
  }
  PYRINGAR_DEVICE void publish(std::uint32_t n) { tell(shared_.ports.out_flag, n); }
  PYRINGAR_DEVICE void free_message(std::uint32_t n) { tell(shared_.ports.in_taken, n); }

  PYRINGAR_DEVICE void run_action(int action, Range range, std::uint32_t n_in,
                                  std::uint32_t n_out) {
    RingMove<E> move(args_, shared_);
    pyringar::run_ring_action(move, shared_.program, action, range, n_in, n_out);
    if (move.kind == Kind::kNothing) return;
    perform(move, static_cast<int>(range.size()),
            static_cast<int>(range.begin % RingMove<E>::kPackElems));
    if (move.is_shared) is_fenced_ = false;
  }

 private:
  using Kind = typename RingMove<E>::Kind;

  // Set a flag. One fence orders both flags of an action, if other blocks access the data.
  PYRINGAR_DEVICE void tell(std::uint32_t* flag, std::uint32_t n) {
    if (!is_fenced_) block_fence(shared_.scope);
    is_fenced_ = true;
    signal(flag, n, shared_.scope);
  }

  PYRINGAR_DEVICE void perform(const RingMove<E>& move, int n, int shift) const {
    if (move.kind == Kind::kCopy) {
      move_range(n, shift,
                 CopyJob<E, Element>{move.own, move.kept, static_cast<Element*>(move.sent)});
    } else if (move.kind == Kind::kWiden) {
      move_range(n, shift,
                 CopyJob<E, Partial>{move.own, nullptr, static_cast<Partial*>(move.sent)});
    } else if (!std::is_same_v<Element, Partial> && move.receives_input) {
      reduce<Element>(move, n, shift);
    } else {
      reduce<Partial>(move, n, shift);
    }
  }
  template <typename Received>
  PYRINGAR_DEVICE void reduce(const RingMove<E>& move, int n, int shift) const {
    if (move.kind == Kind::kAdd) {
      reduce_to<Received, ReduceOutput::kPartial>(move, n, shift);
    } else if (std::is_same_v<Op, Sum> && args_.divisor.value != 1) {
      reduce_to<Received, ReduceOutput::kMean>(move, n, shift);
    } else {
      reduce_to<Received, ReduceOutput::kResult>(move, n, shift);
    }
  }
  template <typename Received, ReduceOutput kOutput>
  PYRINGAR_DEVICE void reduce_to(const RingMove<E>& move, int n, int shift) const {
    using Job = ReduceJob<E, Op, Received, kOutput>;
    move_range(n, shift,
               Job{static_cast<const Received*>(move.received), move.own, move.kept,
                   static_cast<typename Job::Sent*>(move.sent), args_.divisor});
  }

  const RingArgs& args_;
  const RingShared& shared_;
  bool is_fenced_ = true;  // no data was moved since the last fence
};

// run_ring() selects this overload, which inlines the data movement once for all actions.
template <typename E, typename Op>
PYRINGAR_DEVICE void run_ring_action(BlockRing<E, Op>& engine, const RingProgram&, int action,
                                     Range range, std::uint32_t n_in, std::uint32_t n_out) {
  engine.run_action(action, range, n_in, n_out);
}

template <typename E, typename Op>
PYRINGAR_KERNEL(kRingThreads, kRingBlocksEach)
ring_kernel(PYRINGAR_KERNEL_ARG RingArgs args) {
  const int local = static_cast<int>(block_index()) / args.num_channels;
  const int channel = static_cast<int>(block_index()) % args.num_channels;
  if (args.patience.withheld == args.rank[local]) return;
  RingShared& shared = block_shared<RingShared>();
  if (thread_index() == 0) shared.fill(args, local, channel);
  block_barrier();
  BlockRing<E, Op> engine(args, shared);
  if (!run_ring(engine, shared.program, shared.cut)) return;
  block_barrier();
  if (thread_index() == 0) {
    store_release(shared.ports.base, shared.program.base + ring_num_messages(shared.program));
  }
}

}  // namespace pyringar::cuda
