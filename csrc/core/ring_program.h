// ring_program: the steps of one rank in a ring collective, written once for CPU threads and GPUs.
// Units     elements for ranges, messages for counters.
// Contract  The link from rank r to rank r+1 has one writer, one reader and S slots. Message n lies
//           in slot n % S; n counts from 1 and is never reset.
//
//             writer (rank r)                          reader (rank r+1)
//             W1 wait taken >= n - S (acquire)         R1 wait flag >= n   (acquire)
//             W2 write slot[n % S]                     R2 read slot[n % S]
//             W3 flag = n            (release)         R3 taken = n        (release)
//
//           Piece p is at action a in tick p + a. A rank waits only for messages of the last tick.
//           A link has S >= 2k slots: the 2k - 2 messages of one tick, and two more. So the slowest
//           rank always finds its message and a free slot.
// Threads   One call per rank, all ranks at once. If a wait fails (deadline, abort), the program
//           returns false at once; the engine knows the reason.
// Source    Patarasuk & Yuan 2009. NCCL fuses reduce, store and forward in recvReduceCopySend.
// Tests     tests/cpp/ring_test.cpp under ThreadSanitizer, tests/conformance/test_bits.py
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/schedule.h"

namespace pyringar {

// Slots per link: a power of two, so that n % slots stays in sequence when n wraps at 2^32.
PYRINGAR_HD constexpr std::uint32_t ring_num_slots(int world_size) {
  std::uint32_t slots = 2;
  while (slots < 2 * static_cast<std::uint32_t>(world_size)) slots *= 2;
  return slots;
}

enum class RingPhases { kAllReduce, kReduceScatter, kAllGather };

struct RingProgram {
  int rank;
  int world_size;
  std::size_t numel;        // elements of the whole buffer, which is cut into world_size chunks
  std::size_t piece_elems;  // most elements per piece; a piece must fit into one slot
  RingPhases phases;
  std::uint32_t base;  // messages that every link carried in earlier calls
  // Several channels may share a rank, each with separate links. This channel takes every
  // piece_stride-th piece of each chunk, starting with first_piece.
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

// Compare counters by difference, since they wrap after 2^32 messages.
PYRINGAR_HD constexpr bool reached(std::uint32_t counter, std::uint32_t wanted) {
  return static_cast<std::int32_t>(counter - wanted) >= 0;
}

// Action a receives the chunk that prev sent at step a - 1, and sends the same chunk at step a. The
// Engine reduces, stores and forwards a piece in one pass. It provides for message n:
//   bool wait_message(n, a)          R1      bool wait_slot(n, a)    W1
//   void publish(n)                  W3      void free_message(n)    R3
// An Engine may skip the slot if the reader can read the data in the tensor and it stays unchanged.
// n_in is the received message, n_out the sent one.
//   void send_own(range, n_out)                  send the own input
//   void reduce_forward(range, n_in, n_out)      partial + own input, send
//   void reduce_finish(range, n_in)              partial + own input, divide, round, store
//   void reduce_finish_forward(range, n_in, n_out)    reduce_finish, then send
//   void gather_own(range, n_out)                store and send the own result
//   void copy_forward(range, n_in, n_out)        store and send a received result
//   void copy_last(range, n_in)                  store a received result
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

// Values derived from a RingProgram. A GPU kernel computes them once.
struct RingCut {
  Chunks chunks;
  std::uint32_t pieces;  // pieces per chunk in this channel; 32 bits suffice for any memory
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
