// ring_jobs: how one block reduces or copies the elements of a piece.
//
// Units     elements. Pointers are to the first element of the piece.
// Contract  A job loads and stores units of 16 bytes of elements, or single elements. A thread
//           loads a batch of units before it uses the first. If a tensor is not aligned as its
//           slots are, the whole piece is moved in single elements.
// Threads   all threads of a block, with equal arguments, in no order.
// Tests     tests/cpp/cuda/ring_kernel_test.cpp, tests/build/test_cuda_kernels.py
#pragma once

#include <type_traits>

#include "cuda/pack.cuh"

namespace pyringar::cuda {

enum class ReduceOutput { kPartial, kResult, kMean };

// Batch size in units: the most that 64 registers hold without spilling.
constexpr int ring_batch(std::size_t item, bool divides) {
  if (item == 1) return 1;
  if (divides) return item == 2 ? 1 : 2;
  return item == 2 ? 2 : 4;
}

// Reduce job: received + own. A partial sum goes to the next slot, a result to the output too.
// Received is Partial (a slot) or Element (prev's input).
template <typename E, typename Op, typename Received, ReduceOutput kOutput>
struct ReduceJob {
  static constexpr bool kFinishes = kOutput != ReduceOutput::kPartial;
  static constexpr int kPackElems = kPackBytes / static_cast<int>(sizeof(typename E::Element));
  using Element = typename E::Element;
  using Partial = typename E::Partial;
  using Sent = std::conditional_t<kFinishes, Element, Partial>;
  template <int kSize>
  struct Loaded {
    Lanes<Received, kSize> received;
    Lanes<Element, kSize> own;
  };
  static constexpr int kBatch = ring_batch(sizeof(Element), kOutput == ReduceOutput::kMean);

  const Received* received;
  const Element* own;
  Element* kept;
  Sent* sent;
  Divisor divisor;

  PYRINGAR_DEVICE bool is_aligned(int i) const {
    return is_vector(own + i) && is_vector(received + i) && (!kFinishes || is_vector(kept + i));
  }
  template <int kSize>
  PYRINGAR_DEVICE Loaded<kSize> load(int i) const {
    return {load_lanes<kSize>(received + i), load_lanes<kSize>(own + i)};
  }
  template <int kSize>
  PYRINGAR_DEVICE void store(int i, const Loaded<kSize>& loaded) const {
    Received left[kSize];
    Element right[kSize];
    Sent result[kSize];
    loaded.received.read(left);
    loaded.own.read(right);
#pragma unroll
    for (int lane = 0; lane < kSize; ++lane) {
      const Partial sum =
          Op::template apply<Partial>(as_partial(left[lane]), E::widened(right[lane]));
      if constexpr (kFinishes) {
        result[lane] = E::narrowed(kOutput == ReduceOutput::kMean ? divided(sum, divisor) : sum);
      } else {
        result[lane] = sum;
      }
    }
    const auto lanes = Lanes<Sent, kSize>::of(result);
    if constexpr (kFinishes) store_lanes(lanes, kept + i);
    if (!kFinishes || sent != nullptr) store_lanes(lanes, sent + i);
  }

 private:
  static PYRINGAR_DEVICE Partial as_partial(Received x) {
    if constexpr (std::is_same_v<Received, Partial>) {
      return x;
    } else {
      return E::widened(x);
    }
  }
};

// Copy job: input, output or slot to the output and the next slot. Either destination may be null.
template <typename E, typename Sent>
struct CopyJob {
  static constexpr int kPackElems = kPackBytes / static_cast<int>(sizeof(typename E::Element));
  using Element = typename E::Element;
  template <int kSize>
  using Loaded = Lanes<Element, kSize>;
  static constexpr int kBatch = sizeof(Sent) > sizeof(Element) ? 2 : 4;

  const Element* from;
  Element* kept;
  Sent* sent;

  PYRINGAR_DEVICE bool is_aligned(int i) const {
    return is_vector(from + i) && (kept == nullptr || is_vector(kept + i));
  }
  template <int kSize>
  PYRINGAR_DEVICE Loaded<kSize> load(int i) const {
    return load_lanes<kSize>(from + i);
  }
  template <int kSize>
  PYRINGAR_DEVICE void store(int i, const Loaded<kSize>& loaded) const {
    if (kept != nullptr) store_lanes(loaded, kept + i);
    if (sent == nullptr) return;
    if constexpr (std::is_same_v<Sent, Element>) {
      store_lanes(loaded, sent + i);
    } else {
      Element elements[kSize];
      Sent partials[kSize];
      loaded.read(elements);
#pragma unroll
      for (int lane = 0; lane < kSize; ++lane) partials[lane] = E::widened(elements[lane]);
      store_lanes(Lanes<Sent, kSize>::of(partials), sent + i);
    }
  }
};

// Move one batch of units of kSize elements. kFull: every unit exists, so loads are unconditional.
template <bool kFull, int kSize, int kBatch, typename Job>
PYRINGAR_DEVICE void move_batch(int i, int step, int end, const Job& job) {
  const auto is_mine = [&](int u) { return kFull || i + u * step < end; };
  typename Job::template Loaded<kSize> loaded[kBatch] = {};
#pragma unroll
  for (int u = 0; u < kBatch; ++u) {
    if (is_mine(u)) loaded[u] = job.template load<kSize>(i + u * step);
  }
#pragma unroll
  for (int u = 0; u < kBatch; ++u) {
    if (is_mine(u)) job.template store<kSize>(i + u * step, loaded[u]);
  }
}

template <int kSize, typename Job>
PYRINGAR_DEVICE void move_units(int begin, int end, const Job& job) {
  constexpr int kBatch = Job::kBatch;
  const int step = static_cast<int>(num_threads<kRingThreads>()) * kSize;
  int i = begin + static_cast<int>(thread_index()) * kSize;
  for (; i + (kBatch - 1) * step < end; i += kBatch * step) {
    move_batch<true, kSize, kBatch>(i, step, end, job);
  }
  if constexpr (kBatch > 1) {
    if (i < end) move_batch<false, kSize, kBatch - 1>(i, step, end, job);
  }
}

// Run a job over n elements. shift: elements from a 16-byte boundary to the first element.
template <typename Job>
PYRINGAR_DEVICE void move_range(int n, int shift, const Job& job) {
  constexpr int kPack = Job::kPackElems;
  const int first = (kPack - shift) % kPack;
  const int head = first < n && job.is_aligned(first) ? first : n;
  const int tail = head + (n - head) / kPack * kPack;
  move_units<kPack>(head, tail, job);
  move_units<1>(0, head, job);
  move_units<1>(tail, n, job);
}

}  // namespace pyringar::cuda
