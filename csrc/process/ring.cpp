// ring: memory and arithmetic of a process for the ring program.
//
// Tests     tests/test_processes.py, tests/cpp/process_test.cpp

#include "process/ring.h"

#include "core/ring_program.h"
#include "cpu/kernels.h"

namespace pyringar {

namespace {

class ProcessRing {
 public:
  ProcessRing(const TensorSpan& tensor, Fold fold, ProcessRank& self)
      : tensor_(tensor),
        divisor_(fold.divisor),
        item_(item_bytes(tensor.dtype)),
        partial_is_element_(partial_bytes(tensor.dtype) == item_),
        kernels_(kernels(tensor.dtype, fold.op)),
        copy_(kernels(DType::kUInt8, ReduceOp::kSum)),
        self_(self),
        segment_(self.segment),
        next_((self.rank + 1) % segment_.world_size()),
        prev_((self.rank + segment_.world_size() - 1) % segment_.world_size()),
        in_(segment_.line(prev_).link),
        out_(segment_.line(self.rank).link) {}

  bool wait_message(std::uint32_t n, int) {
    return self_.watch.wait(in_.flag, n, prev_, "to send");
  }
  bool wait_slot(std::uint32_t n, int) {
    return self_.watch.wait(out_.taken, n - segment_.ring_num_slots(), next_, "to receive");
  }
  void publish(std::uint32_t n) { out_.flag.set(n, kWakeAll, Scope::kProcesses); }
  void free_message(std::uint32_t n) { in_.taken.set(n, kWakeAll, Scope::kProcesses); }

  void send_own(Range range, std::uint32_t n_out) {
    if (partial_is_element_) {
      copy(own(range), {slot_out(n_out)}, range);
    } else {
      kernels_.widen(own(range), slot_out(n_out), range.size());
    }
  }
  void reduce_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    kernels_.accumulate(slot_in(n_in), own(range), slot_out(n_out), range.size());
  }
  void reduce_finish(Range range, std::uint32_t n_in) { finish(n_in, {own(range)}, range); }
  void reduce_finish_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    finish(n_in, {own(range), slot_out(n_out)}, range);
  }
  void gather_own(Range range, std::uint32_t n_out) { copy(own(range), {slot_out(n_out)}, range); }
  void copy_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    copy(slot_in(n_in), {own(range), slot_out(n_out)}, range);
  }
  void copy_last(Range range, std::uint32_t n_in) { copy(slot_in(n_in), {own(range)}, range); }

 private:
  void* own(Range range) const { return tensor_.data + range.begin * item_; }
  void* slot_in(std::uint32_t n) const { return segment_.ring_slot(prev_, n); }
  void* slot_out(std::uint32_t n) const { return segment_.ring_slot(self_.rank, n); }

  void finish(std::uint32_t n_in, std::initializer_list<void*> to, Range range) {
    kernels_.finish(slot_in(n_in), own(range), to.begin(), static_cast<int>(to.size()),
                    range.size(), divisor_);
  }
  // As bytes: loading a 16-bit float as fp32 would quieten a NaN.
  void copy(const void* from, std::initializer_list<void*> to, Range range) {
    copy_.fused(&from, 1, to.begin(), static_cast<int>(to.size()), range.size() * item_, 1);
  }

  const TensorSpan& tensor_;
  const int divisor_;
  const std::size_t item_;
  const bool partial_is_element_;
  const Kernels& kernels_;
  const Kernels& copy_;
  ProcessRank& self_;
  const Segment& segment_;
  const int next_;
  const int prev_;
  Link& in_;
  Link& out_;
};

}  // namespace

bool run_process_ring(const TensorSpan& tensor, Fold fold, ProcessRank& self) {
  const RingProgram program{self.rank,
                            self.segment.world_size(),
                            tensor.numel,
                            self.segment.ring_slot_bytes() / partial_bytes(tensor.dtype),
                            RingPhases::kAllReduce,
                            self.ring_messages};
  self.ring_messages += ring_num_messages(program);
  ProcessRing engine(tensor, fold, self);
  return run_ring(engine, program);
}

}  // namespace pyringar
