// ring_program: what one rank does in a ring collective, written once for every engine.
//
// Units     elements for ranges, messages for counters.
// Contract  On the link from rank r to rank r+1 there is one writer and one reader, and S slots;
//           message n lies in slot n % S, n counted from 1 and never reset:
//
//             writer (rank r)                          reader (rank r+1)
//             W1 wait taken >= n - S (acquire)         R1 wait flag >= n   (acquire)
//             W2 write slot[n % S]                     R2 read slot[n % S]
//             W3 flag = n            (release)         R3 taken = n        (release)
//
//           Pieces follow each other one action apart: piece p is at action a in tick p + a. A rank
//           waits for messages of the tick before. A link holds one tick's messages, at most
//           2k - 2, and two more: the slowest rank finds its message and a free slot.
// Threads   one call per rank, all ranks at once. A wait that fails (deadline, abort) ends the
//           program at once and returns false; the engine knows why.
// Source    Patarasuk & Yuan 2009; NCCL's recvReduceCopySend fuses reduce, keep and forward.
// Tests     tests/cpp/stress.cpp (under ThreadSanitizer, with random delays),
//           tests/conformance/test_bits.py
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/schedule.h"

namespace pyringar {

// A power of two, so that n % slots goes on evenly when the counter wraps.
PYRINGAR_HD constexpr std::uint32_t ring_num_slots(int world_size) {
  std::uint32_t slots = 2;
  while (slots < 2 * static_cast<std::uint32_t>(world_size)) slots *= 2;
  return slots;
}

enum class RingPhases { kAllReduce, kReduceScatter, kAllGather };

struct RingProgram {
  int rank;
  int world_size;
  std::size_t numel;        // of the whole buffer that is cut into world_size chunks
  std::size_t piece_elems;  // at most what a slot holds
  RingPhases phases;
  std::uint32_t base;  // messages that every link has carried before
  // Several runners may share a rank, each with links of its own: this one takes every
  // piece_stride-th piece of each chunk, from first_piece on.
  std::size_t first_piece = 0;
  std::size_t piece_stride = 1;
};

PYRINGAR_HD constexpr std::size_t ring_num_own_pieces(const RingProgram& program) {
  const std::size_t all = num_pieces(program.numel, program.world_size, program.piece_elems);
  if (all <= program.first_piece) return 0;
  return (all - program.first_piece + program.piece_stride - 1) / program.piece_stride;
}

PYRINGAR_HD constexpr int ring_first_action(RingPhases phases, int world_size) {
  return phases == RingPhases::kAllGather ? world_size - 1 : 0;
}

PYRINGAR_HD constexpr int ring_last_action(RingPhases phases, int world_size) {
  return phases == RingPhases::kReduceScatter ? world_size - 1 : ring_num_steps(world_size);
}

PYRINGAR_HD constexpr std::uint32_t ring_num_messages(const RingProgram& program) {
  const int actions = ring_last_action(program.phases, program.world_size) -
                      ring_first_action(program.phases, program.world_size);
  return static_cast<std::uint32_t>(ring_num_own_pieces(program) *
                                    static_cast<std::size_t>(actions));
}

// Counters wrap after 2^32 messages; their difference does not.
PYRINGAR_HD constexpr bool reached(std::uint32_t counter, std::uint32_t wanted) {
  return static_cast<std::int32_t>(counter - wanted) >= 0;
}

// Action a receives what was sent at step a - 1 and sends at step a, and both are the same chunk:
// what arrives is reduced with the rank's own part, kept if it is complete, and passed on, in one
// pass over the data. Engine provides, for messages and ranges:
//   bool wait_message(n, a)          R1      bool wait_slot(n, a)    W1
//   void publish(n)                  W3      void free_message(n)    R3
// and may leave a message's data where it lies, if the reader can reach it there and it stays.
//   void send_own(range, n_out)                  partial of this rank alone
//   void reduce_forward(range, n_in, n_out)      partial + own
//   void reduce_finish(range, n_in)              partial + own, finished, kept
//   void reduce_finish_forward(range, n_in, n_out)
//   void gather_own(range, n_out)                own result, kept and sent
//   void copy_forward(range, n_in, n_out)        result, kept and passed on
//   void copy_last(range, n_in)                  result, kept
PYRINGAR_ANY_SIDE
template <class Engine>
PYRINGAR_HD void run_ring_action(Engine& engine, const RingProgram& program, int action,
                                 Range range, std::uint32_t n_in, std::uint32_t n_out) {
  const int finish = program.world_size - 1;
  const bool receives = action > ring_first_action(program.phases, program.world_size);
  const bool sends = action < ring_last_action(program.phases, program.world_size);
  if (action < finish) {
    if (receives) {
      engine.reduce_forward(range, n_in, n_out);
    } else {
      engine.send_own(range, n_out);
    }
  } else if (action == finish) {
    if (!receives) {
      engine.gather_own(range, n_out);
    } else if (sends) {
      engine.reduce_finish_forward(range, n_in, n_out);
    } else {
      engine.reduce_finish(range, n_in);
    }
  } else if (sends) {
    engine.copy_forward(range, n_in, n_out);
  } else {
    engine.copy_last(range, n_in);
  }
}

struct RingCut {
  Chunks chunks;
  // Of each chunk, that this runner takes. No memory holds 2^32 for every rank.
  std::uint32_t pieces;
  std::uint32_t ticks;
  int first_action;
  int last_action;
};

PYRINGAR_HD constexpr RingCut ring_cut(const RingProgram& program) {
  const int first = ring_first_action(program.phases, program.world_size);
  const int last = ring_last_action(program.phases, program.world_size);
  const auto pieces = static_cast<std::uint32_t>(ring_num_own_pieces(program));
  return {chunks_of(program.numel, program.world_size), pieces,
          pieces == 0 ? 0 : pieces + static_cast<std::uint32_t>(last - first), first, last};
}

PYRINGAR_ANY_SIDE
template <class Engine>
PYRINGAR_HD bool run_ring(Engine& engine, const RingProgram& program, const RingCut& cut) {
  std::uint32_t received = program.base;
  std::uint32_t sent = program.base;
  for (std::uint32_t tick = 0; tick < cut.ticks; ++tick) {
    for (int action = cut.first_action; action <= cut.last_action; ++action) {
      const auto age = static_cast<std::uint32_t>(action - cut.first_action);
      if (age > tick || tick - age >= cut.pieces) continue;
      const bool receives = action > cut.first_action;
      const bool sends = action < cut.last_action;
      const int chunk = ring_step(program.rank, program.world_size, action).send_chunk;
      const std::size_t piece =
          program.first_piece + std::size_t{tick - age} * program.piece_stride;
      const Range range = piece_range(cut.chunks[chunk], program.piece_elems, piece);
      if (receives && !engine.wait_message(++received, action)) return false;
      if (sends && !engine.wait_slot(++sent, action)) return false;
      run_ring_action(engine, program, action, range, received, sent);
      if (sends) engine.publish(sent);
      if (receives) engine.free_message(received);
    }
  }
  return true;
}

}  // namespace pyringar
