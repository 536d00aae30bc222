// staged_program: what one rank does where ranks see each other's staging slots only, written once
// for processes, GPUs, and threads in tests.
//
// Units     pieces and messages; message n is the n-th piece over the life of the group, counted
//           from 1 and never reset. Every rank has kStagingSlots slots; its part of message n lies
//           in slot n % kStagingSlots, and on hosts where staging_slot() says.
// Contract  Every rank owns two counters that only it writes and that only grow (modulo 2^32):
//
//             announced   its part of message n lies in its slot       (release)
//             reduced     its slice of message n is finished there     (release)
//
//           and waits for those of all ranks (acquire). Nothing tells a writer that a slot is free:
//           it follows. A rank announces n only after it is done with n - 2, and says n reduced
//           only after it is done with n - 1. A rank that writes slot n % 4 has seen one of the two
//           from all ranks, so that no rank still reads message n - 4 there:
//
//             direct     writes n after all said n - 2 reduced    -> all are done with n - 3
//             exchange   writes n after all announced n - 2       -> all are done with n - 4
//             and where one follows the other, the weaker of the two holds.
//
//           An exchange leaves `reduced` behind; a direct call brings it up before it announces, so
//           that a comparison never turns at 2^31. The first message of a call carries what the
//           call is; agree() compares on every rank alike, before any rank's tensors are written.
// Threads   one call per rank, all at once. A wait that fails ends the program and returns false.
// Source    the shared-memory all-reduces of DeepSpeed and gloo, as a pipeline
// Tests     tests/cpp/process_test.cpp under ThreadSanitizer, tests/cpp/cuda_processes
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/ring_program.h"

namespace pyringar {

inline constexpr std::uint32_t kStagingSlots = 4;

// The owner's slots, or the peer's: two ranks swap them every kStagingSlots messages. Each writes
// where it has read last, so that a line crosses between the cores once a message, not twice.
struct StagingSlot {
  int owner;
  std::uint32_t index;
};
constexpr StagingSlot staging_slot(int rank, int world_size, std::uint32_t n,
                                   std::uint32_t num_slots = kStagingSlots) {
  const int swapped = world_size == 2 ? static_cast<int>(n / num_slots % 2) : 0;
  return {rank ^ swapped, n % num_slots};
}

struct StagedProgram {
  std::uint32_t base;      // messages of all calls before
  std::size_t num_pieces;  // at least 1: a call that moves nothing is announced all the same
};

// Calls finish(piece, n) for every piece, once all ranks have announced it. A piece ahead is copied
// in before a rank waits, so that ranks that share a core find work to do. Engine provides:
//   void copy_in(piece, n)      own tensor -> own slot       bool wait_announced(n)   of all ranks
//   void announce(n)                                         bool agree(n)            first message
template <class Engine, typename Finish>
bool run_staged(Engine& engine, const StagedProgram& program, const Finish& finish) {
  std::uint32_t n = program.base + 1;
  engine.copy_in(0, n);
  engine.announce(n);
  for (std::size_t piece = 0; piece < program.num_pieces; ++piece, ++n) {
    if (piece + 1 < program.num_pieces) {
      engine.copy_in(piece + 1, n + 1);
      engine.announce(n + 1);
    }
    if (!engine.wait_announced(n)) return false;
    if (piece == 0 && !engine.agree(n)) return false;
    if (!finish(piece, n)) return false;
  }
  return true;
}

// Each rank reduces its slice of every piece in its slot, and copies the others'. Engine also has:
//   void reduce(piece, n)       all slots -> own slot        bool wait_reduced(n)     of all ranks
//   void publish_reduced(n)                                  void copy_out(piece, n)  -> own tensor
template <class Engine>
bool run_staged_direct(Engine& engine, const StagedProgram& program) {
  engine.publish_reduced(program.base);
  return run_staged(engine, program, [&](std::size_t piece, std::uint32_t n) {
    engine.reduce(piece, n);
    engine.publish_reduced(n);
    if (!engine.wait_reduced(n)) return false;
    engine.copy_out(piece, n);
    return true;
  });
}

// Each rank reads what it needs from all slots into its own tensors: one wait per piece. For small
// messages, which all ranks reduce whole, and for collectives whose results differ by rank.
//   void combine(piece, n)      all slots -> own tensor
template <class Engine>
bool run_staged_exchange(Engine& engine, const StagedProgram& program) {
  return run_staged(engine, program, [&](std::size_t piece, std::uint32_t n) {
    engine.combine(piece, n);
    return true;
  });
}

}  // namespace pyringar
