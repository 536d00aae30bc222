// ring: memory and arithmetic of the ring program on CPU threads.
#include "cpu/ring.h"

#include "core/error.h"
#include "cpu/kernels.h"

namespace pyringar {

namespace {

// The Engine of core/ring_program.h for one rank on a CPU thread.
class ThreadRing {
 public:
  ThreadRing(int rank, const Buffers& tensor, Fold fold, RingLinks& ring, Watch& watch)
      : rank_(rank),
        world_size_(ring.world_size()),
        prev_((rank + world_size_ - 1) % world_size_),
        first_of_prev_(
            chunk_range(tensor.numel, world_size_, ring_step(prev_, world_size_, 0).send_chunk)),
        fold_(fold),
        item_(item_bytes(tensor.dtype)),
        partial_is_element_(partial_bytes(tensor.dtype) == item_),
        tensor_(tensor),
        kernels_(kernels(tensor.dtype, fold.op)),
        ring_(ring),
        in_(ring.links[static_cast<std::size_t>(prev_)]),
        out_(ring.links[static_cast<std::size_t>(rank)]),
        watch_(watch) {}

  bool wait_message(std::uint32_t n, int action) {
    return watch_.wait(rank_, in_.flag, n, n,
                       [&] { return late(prev_, action - 1, "to send", in_.flag, n); });
  }
  bool wait_slot(std::uint32_t n, int action) {
    return watch_.wait(rank_, out_.taken, n - ring_.num_slots, n, [&] {
      return late((rank_ + 1) % world_size_, action, "to receive", out_.taken, n - ring_.num_slots);
    });
  }
  void publish(std::uint32_t n) { out_.flag.set(n); }
  void free_message(std::uint32_t n) { in_.taken.set(n); }

  void send_own(Range, std::uint32_t) {}  // no copy: the next rank reads the tensor
  void reduce_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    void* partial = ring_.slot(rank_, n_out);
    if (!is_input_of_prev(range)) {
      kernels_.accumulate(ring_.slot(prev_, n_in), input(rank_, range), partial, range.size());
    } else if (partial_is_element_) {
      const void* both[] = {input(prev_, range), input(rank_, range)};
      kernels_.fused(both, 2, &partial, 1, range.size(), 1);
    } else {
      kernels_.widen(input(prev_, range), partial, range.size());
      kernels_.accumulate(partial, input(rank_, range), partial, range.size());
    }
  }
  void reduce_finish(Range range, std::uint32_t n_in) {
    void* result = output(rank_, range);
    if (is_input_of_prev(range)) {
      const void* both[] = {input(prev_, range), input(rank_, range)};
      kernels_.fused(both, 2, &result, 1, range.size(), fold_.divisor);
    } else {
      kernels_.finish(ring_.slot(prev_, n_in), input(rank_, range), &result, 1, range.size(),
                      fold_.divisor);
    }
  }
  void reduce_finish_forward(Range range, std::uint32_t n_in, std::uint32_t) {
    reduce_finish(range, n_in);
  }
  void gather_own(Range range, std::uint32_t) { copy_to_output(range, input(rank_, range)); }
  void copy_forward(Range range, std::uint32_t n_in, std::uint32_t) { copy_last(range, n_in); }
  void copy_last(Range range, std::uint32_t) { copy_to_output(range, output(prev_, range)); }

 private:
  // Return true if prev's message is prev's own input, which is its first chunk. Inputs and results
  // need no slot: ranks read them in the tensors of other ranks. Both stay valid: a result reaches
  // a rank only after all ranks used that rank's input.
  bool is_input_of_prev(Range range) const {
    return first_of_prev_.begin <= range.begin && range.begin < first_of_prev_.end;
  }

  void copy_to_output(Range range, const void* from) {
    // Copy as bytes, since widening a 16-bit float would quiet a signalling NaN. Not by memcpy: its
    // `rep movsb` is slow on cache lines that another core just wrote.
    void* to = output(rank_, range);
    kernels(DType::kUInt8, ReduceOp::kSum).fused(&from, 1, &to, 1, range.size() * item_, 1);
  }
  // The input of an all-gather, and the output of a reduce-scatter, holds the rank's chunk only.
  std::size_t first_elem(int rank, RingPhases one_chunk) const {
    return tensor_.phases == one_chunk ? chunk_range(tensor_.numel, world_size_, rank).begin : 0;
  }
  const void* input(int rank, Range range) const {
    const std::size_t at = range.begin - first_elem(rank, RingPhases::kAllGather);
    return static_cast<const std::byte*>(tensor_.sources[rank]) + at * item_;
  }
  void* output(int rank, Range range) const {
    const std::size_t at = range.begin - first_elem(rank, RingPhases::kReduceScatter);
    return static_cast<std::byte*>(tensor_.destinations[rank]) + at * item_;
  }
  std::string late(int peer, int step, const char* what, const Flag& counter,
                   std::uint32_t wanted) const {
    const char* reduction = tensor_.phases == RingPhases::kAllGather ? "copy" : op_name(fold_.op);
    return watch_.late(join("ring ", reduction, " of ", tensor_.numel, " ",
                            dtype_name(tensor_.dtype), " elements"),
                       rank_, peer,
                       join(what, " at step ", step, " of ", ring_num_steps(world_size_),
                            " (message ", counter.value.load(), " of ", wanted, ")"));
  }

  const int rank_;
  const int world_size_;
  const int prev_;
  const Range first_of_prev_;
  const Fold fold_;
  const std::size_t item_;
  const bool partial_is_element_;
  const Buffers& tensor_;
  const Kernels& kernels_;
  const RingLinks& ring_;
  Link& in_;
  Link& out_;
  Watch& watch_;
};

}  // namespace

bool ring_rank(int rank, const Buffers& tensor, Fold fold, RingLinks& ring, std::uint32_t base,
               Watch& watch) {
  ThreadRing engine(rank, tensor, fold, ring, watch);
  const RingProgram program = ring_program(rank, tensor, ring, base);
  return run_ring(engine, program, ring_cut(program));
}

}  // namespace pyringar
