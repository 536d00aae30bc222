// ring: the ring program of core/ring_program.h on thread blocks, slots in the next rank's memory.
//
// Floor     cuda: device code.
// Contract  one block per (local rank, channel), all co-resident (a cooperative launch); channel c
//           takes pieces c, c + C, ... of every chunk, with slots and flags of its own, so the
//           order of addition is the one of the CPU's ring. A rank touches only its own tensors and
//           the slots, so tensors need not be visible to other devices. The messages that a
//           channel's links have carried lie in device memory and advance by themselves: a replayed
//           graph goes on where the last replay ended.
//
//             where          what                               who writes
//             reader's side  slots, flag                        the writer (prev)
//             writer's side  taken                              the reader (next)
//             own            base                               the rank itself, at its end
//
//           In a slot, element i of a piece lies at index shift + i, so that what is 16-byte
//           aligned in an aligned tensor is so in the slot.
// Tests     tests/cpp/cuda/ring_test.cpp under ThreadSanitizer, tests/cuda
#pragma once

#include "cuda/flag.cuh"
#include "cuda/pack.cuh"

namespace pyringar::cuda {

template <typename E, typename Op>
class BlockRing {
 public:
  using Element = typename E::Element;
  using Partial = typename E::Partial;
  static constexpr std::size_t kPackElems = 16 / sizeof(Element);

  PYRINGAR_DEVICE BlockRing(const RingArgs& args, int local, int channel)
      : args_(args),
        ports_(args.ports[local]),
        rank_(args.rank[local]),
        flag_at_(static_cast<std::size_t>(channel) * kFlagStride),
        slots_at_(static_cast<std::size_t>(channel) * args.num_slots * args.slot_bytes),
        input_(static_cast<const Element*>(args.input[local])),
        output_(static_cast<Element*>(args.output[local])),
        waits_(args.patience, block_words()) {}

  PYRINGAR_DEVICE bool wait_message(std::uint32_t n, int action) {
    return waits_.wait(ports_.in_flag + flag_at_, n, action - 1, [&](Failure& failure) {
      failure.rank = rank_;
      failure.peer = (rank_ + args_.world_size - 1) % args_.world_size;
      failure.step = action - 1;
      failure.what = Awaited::kMessage;
    });
  }
  // Its patience ends after that of any message: what is missing shows there first.
  PYRINGAR_DEVICE bool wait_slot(std::uint32_t n, int action) {
    const std::uint32_t wanted = n - args_.num_slots;
    const int step = 2 * args_.world_size + action;
    return waits_.wait(ports_.out_taken + flag_at_, wanted, step, [&](Failure& failure) {
      failure.rank = rank_;
      failure.peer = (rank_ + 1) % args_.world_size;
      failure.step = action;
      failure.what = Awaited::kSlot;
    });
  }
  PYRINGAR_DEVICE void publish(std::uint32_t n) { signal(ports_.out_flag + flag_at_, n); }
  PYRINGAR_DEVICE void free_message(std::uint32_t n) { acknowledge(ports_.in_taken + flag_at_, n); }

  PYRINGAR_DEVICE void send_own(Range range, std::uint32_t n_out) {
    std::byte* slot = out_slot(n_out);
    for_each(
        range, input(range),
        [&](const auto& own, std::size_t j, std::size_t) { put(slot, j, own); },
        [&](Partial own, std::size_t j, std::size_t) { partials(slot)[j] = own; });
  }
  PYRINGAR_DEVICE void reduce_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    const std::byte* theirs = in_slot(n_in);
    std::byte* slot = out_slot(n_out);
    for_each(
        range, input(range),
        [&](const auto& own, std::size_t j, std::size_t) { put(slot, j, added(theirs, j, own)); },
        [&](Partial own, std::size_t j, std::size_t) {
          partials(slot)[j] = added_one(theirs, j, own);
        });
  }
  PYRINGAR_DEVICE void reduce_finish(Range range, std::uint32_t n_in) {
    finish<false>(range, n_in, nullptr);
  }
  PYRINGAR_DEVICE void reduce_finish_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    finish<true>(range, n_in, out_slot(n_out));
  }
  PYRINGAR_DEVICE void gather_own(Range range, std::uint32_t n_out) {
    std::byte* slot = out_slot(n_out);
    Element* kept = output(range);
    copy(
        range, input(range),
        [&](Bytes16 bytes, std::size_t j, std::size_t i) {
          store_pack(bytes, kept + i);
          store16(bytes, elements(slot) + j);
        },
        [&](Element x, std::size_t j, std::size_t i) { elements(slot)[j] = kept[i] = x; });
  }
  PYRINGAR_DEVICE void copy_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    receive<true>(range, n_in, out_slot(n_out));
  }
  PYRINGAR_DEVICE void copy_last(Range range, std::uint32_t n_in) {
    receive<false>(range, n_in, nullptr);
  }

 private:
  // Where a rank's part of a gather, or its result of a scatter, is its own chunk alone.
  PYRINGAR_DEVICE std::size_t first_elem(RingPhases one_chunk) const {
    if (args_.phases != one_chunk) return 0;
    return chunk_range(args_.numel, args_.world_size, rank_).begin;
  }
  PYRINGAR_DEVICE const Element* input(Range range) const {
    return input_ + (range.begin - first_elem(RingPhases::kAllGather));
  }
  PYRINGAR_DEVICE Element* output(Range range) const {
    return output_ + (range.begin - first_elem(RingPhases::kReduceScatter));
  }
  PYRINGAR_DEVICE const std::byte* in_slot(std::uint32_t n) const {
    return ports_.in_slots + slots_at_ + std::size_t{n % args_.num_slots} * args_.slot_bytes;
  }
  PYRINGAR_DEVICE std::byte* out_slot(std::uint32_t n) const {
    return ports_.out_slots + slots_at_ + std::size_t{n % args_.num_slots} * args_.slot_bytes;
  }
  static PYRINGAR_DEVICE Partial* partials(std::byte* slot) {
    return reinterpret_cast<Partial*>(slot);
  }
  static PYRINGAR_DEVICE Element* elements(std::byte* slot) {
    return reinterpret_cast<Element*>(slot);
  }
  static PYRINGAR_DEVICE bool is_aligned(const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0;
  }
  static PYRINGAR_DEVICE void put(std::byte* slot, std::size_t j, const Pack<E>& pack) {
    pack.to_partials(partials(slot) + j);
  }
  static PYRINGAR_DEVICE Pack<E> added(const std::byte* theirs, std::size_t j, const Pack<E>& own) {
    Pack<E> sum = Pack<E>::from_partials(theirs + j * sizeof(Partial));
    sum.template combine<Op>(own);
    return sum;
  }
  static PYRINGAR_DEVICE Partial added_one(const std::byte* theirs, std::size_t j, Partial own) {
    return Op::template apply<Partial>(load_element(reinterpret_cast<const Partial*>(theirs) + j),
                                       own);
  }
  static PYRINGAR_DEVICE Bytes16 load_pack(const Element* from) {
    if (is_aligned(from)) return load16(from);
    Element some[kPackElems];
#pragma unroll
    for (std::size_t i = 0; i < kPackElems; ++i) some[i] = load_element(from + i);
    Bytes16 bytes;
    __builtin_memcpy(&bytes, some, sizeof bytes);
    return bytes;
  }
  static PYRINGAR_DEVICE void store_pack(Bytes16 bytes, Element* to) {
    if (is_aligned(to)) return store16(bytes, to);
    Element some[kPackElems];
    __builtin_memcpy(some, &bytes, sizeof bytes);
#pragma unroll
    for (std::size_t i = 0; i < kPackElems; ++i) to[i] = some[i];
  }

  // Calls with sixteen bytes of own elements, or one, with its index in the slot and in the range.
  template <typename OnPack, typename OnElement>
  PYRINGAR_DEVICE void copy(Range range, const Element* own, OnPack&& on_pack,
                            OnElement&& on_element) const {
    const std::size_t n = range.size();
    const std::size_t shift = range.begin % kPackElems;
    const std::size_t first = (kPackElems - shift) % kPackElems;
    const std::size_t head = first < n ? first : n;
    const std::size_t packs = (n - head) / kPackElems;
    for (std::size_t p = thread_index(); p < packs; p += num_threads()) {
      const std::size_t i = head + p * kPackElems;
      on_pack(load_pack(own + i), shift + i, i);
    }
    const std::size_t tail = head + packs * kPackElems;
    for (std::size_t s = thread_index(); s < head + (n - tail); s += num_threads()) {
      const std::size_t i = s < head ? s : tail + (s - head);
      on_element(load_element(own + i), shift + i, i);
    }
  }

  template <typename OnPack, typename OnElement>
  PYRINGAR_DEVICE void for_each(Range range, const Element* own, OnPack&& on_pack,
                                OnElement&& on_element) const {
    copy(
        range, own,
        [&](Bytes16 bytes, std::size_t j, std::size_t i) {
          on_pack(Pack<E>::from_elements(bytes), j, i);
        },
        [&](Element x, std::size_t j, std::size_t i) { on_element(E::widened(x), j, i); });
  }

  template <bool kForward>
  PYRINGAR_DEVICE void finish(Range range, std::uint32_t n_in, std::byte* slot) {
    const std::byte* theirs = in_slot(n_in);
    Element* kept = output(range);
    for_each(
        range, input(range),
        [&](const Pack<E>& own, std::size_t j, std::size_t i) {
          Pack<E> sum = added(theirs, j, own);
          sum.template divide<Op>(args_.divisor);
          const Bytes16 bytes = sum.to_elements();
          store_pack(bytes, kept + i);
          if constexpr (kForward) store16(bytes, elements(slot) + j);
        },
        [&](Partial own, std::size_t j, std::size_t i) {
          const Element x = E::narrowed(divided<Op>(added_one(theirs, j, own), args_.divisor));
          kept[i] = x;
          if constexpr (kForward) elements(slot)[j] = x;
        });
  }

  template <bool kForward>
  PYRINGAR_DEVICE void receive(Range range, std::uint32_t n_in, std::byte* slot) {
    const auto* theirs = reinterpret_cast<const Element*>(in_slot(n_in)) + range.begin % kPackElems;
    Element* kept = output(range);
    copy(
        range, theirs,
        [&](Bytes16 bytes, std::size_t j, std::size_t i) {
          store_pack(bytes, kept + i);
          if constexpr (kForward) store16(bytes, elements(slot) + j);
        },
        [&](Element x, std::size_t j, std::size_t i) {
          kept[i] = x;
          if constexpr (kForward) elements(slot)[j] = x;
        });
  }

  const RingArgs& args_;
  const RingPorts ports_;
  const int rank_;
  const std::size_t flag_at_;
  const std::size_t slots_at_;
  const Element* const input_;
  Element* const output_;
  BlockWaits waits_;
};

template <typename E, typename Op>
PYRINGAR_KERNEL(kRingThreads)
ring_kernel(PYRINGAR_KERNEL_ARG RingArgs args) {
  const int local = static_cast<int>(block_index()) / args.num_channels;
  const int channel = static_cast<int>(block_index()) % args.num_channels;
  const int rank = args.rank[local];
  if (args.patience.withheld == rank) return;
  std::uint32_t* base = args.ports[local].base + static_cast<std::size_t>(channel) * kFlagStride;
  const RingProgram program = {rank,
                               args.world_size,
                               args.numel,
                               args.piece_elems,
                               args.phases,
                               load_acquire(base),
                               static_cast<std::size_t>(channel),
                               static_cast<std::size_t>(args.num_channels)};
  BlockRing<E, Op> engine(args, local, channel);
  if (!run_ring(engine, program)) return;
  block_barrier();
  if (thread_index() == 0) store_release(base, program.base + ring_num_messages(program));
}

}  // namespace pyringar::cuda
