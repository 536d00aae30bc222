// staged_program: the steps of one rank if ranks share only staging slots; for processes and GPUs.
// Units     pieces and messages. Message n is the n-th piece in the life of the group; n counts
//           from 1 and is never reset. Each rank has kStagingSlots slots and copies message n into
//           slot n % kStagingSlots; on hosts staging_slot() names the slot.
// Contract  Each rank writes two counters, which only grow (modulo 2^32), and waits for those of
//           all ranks (acquire):
//
//             announced   the rank has copied message n into its slot  (release)
//             reduced     the rank has reduced its slice of message n  (release)
//
//           No counter says that a slot is free; that follows. A rank announces n only after it has
//           finished n - 2, and publishes reduced = n only after it has finished n - 1. A rank that
//           writes slot n % 4 has seen one of these values from all ranks, so no rank still reads
//           message n - 4:
//
//             direct     writes n after all published reduced >= n - 2    -> all finished n - 3
//             exchange   writes n after all published announced >= n - 2  -> all finished n - 4
//             Where calls of both kinds follow each other, the weaker guarantee holds.
//
//           An exchange does not update `reduced`. A direct call first sets it to `base`, so that
//           differences stay below 2^31. With the first message of a call, agree() compares the
//           calls of all ranks before any tensor is written.
// Threads   One call per rank, all at once. If a wait fails, the program returns false.
// Source    the shared-memory all-reduces of DeepSpeed and gloo, as a pipeline
// Tests     tests/cpp/process_test.cpp under ThreadSanitizer, tests/cpp/cuda_processes
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/ring_program.h"

namespace pyringar {

inline constexpr std::uint32_t kStagingSlots = 4;

// The slot of message n. Two ranks swap their slots every kStagingSlots messages. Each rank then
// writes where it last read, so a cache line moves between cores once per message, not twice.
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
  std::uint32_t base;      // number of messages of all earlier calls
  std::size_t num_pieces;  // at least 1: ranks announce an empty call too
};

// Call finish(piece, n) for each piece after all ranks announced it. A rank copies in the next
// piece before it waits, so that ranks sharing a core have work. Engine provides:
//   void copy_in(piece, n)      own tensor -> own slot
//   void announce(n)            publish message n
//   bool wait_announced(n)      wait for all ranks
//   bool agree(n)               compare the calls of all ranks
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

// Each rank reduces one slice of each piece and copies the other slices. Engine also provides:
//   void reduce(piece, n)       all slots -> own slot
//   void publish_reduced(n)     publish the own slice
//   bool wait_reduced(n)        wait for all ranks
//   void copy_out(piece, n)     slots of the other ranks -> own tensor
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

// Each rank reads all slots and writes its own tensors, with one wait per piece. Used for small
// all-reduces, which each rank computes whole, and for all other collectives. Engine also provides:
//   void combine(piece, n)      all slots -> own tensor
template <class Engine>
bool run_staged_exchange(Engine& engine, const StagedProgram& program) {
  return run_staged(engine, program, [&](std::size_t piece, std::uint32_t n) {
    engine.combine(piece, n);
    return true;
  });
}

}  // namespace pyringar
