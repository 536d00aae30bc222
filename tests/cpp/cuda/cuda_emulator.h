// cuda_emulator: what cuda/device.cuh calls a thread, a block and a barrier, on CPU threads: the
// kernels' own source runs here, under sanitizers and with random delays.
//
// Contract  One CPU thread per CUDA thread, all of a launch at once (as a cooperative launch
//           promises), a barrier per block that is the only order between its threads. Launches of
//           one stream follow each other, streams do not wait for each other.
//           Not here: warps, caches, memory that is weaker than the CPU's. ThreadSanitizer judges
//           order by what the kernels say, not by what the processor does.
// Threads   thread_index() and its like belong to the calling thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#define PYRINGAR_DEVICE
#define PYRINGAR_KERNEL(threads) void
#define PYRINGAR_KERNEL_ARG const

namespace pyringar::stress {
class Random;
}

namespace pyringar::emulator {

class BlockBarrier;

// Where the calling thread is. Zeroes on threads that run no kernel.
struct Place {
  unsigned thread;
  unsigned num_threads;
  unsigned block;
  unsigned num_blocks;
  std::uint32_t* words;
  BlockBarrier* barrier;   // none where threads run in turn
  stress::Random* random;  // for delays
};
inline thread_local constinit Place here{};

struct Launch {
  unsigned num_blocks;
  unsigned num_threads;
  std::function<void()> kernel;
};

// For kernels whose threads do not wait for each other: all of them in turn, on this thread.
void run_in_turn(const Launch& launch);

// A stream per device, all streams at once, with random delays.
void run_streams(stress::Random& random, const std::vector<std::vector<Launch>>& streams);

void wait_for_block();
void pause_a_little();

}  // namespace pyringar::emulator

namespace pyringar::cuda {

inline unsigned thread_index() { return emulator::here.thread; }
inline unsigned num_threads() { return emulator::here.num_threads; }
inline unsigned block_index() { return emulator::here.block; }
inline unsigned num_blocks() { return emulator::here.num_blocks; }
inline void block_barrier() { emulator::wait_for_block(); }
inline std::uint32_t* block_words() { return emulator::here.words; }
inline void spin_pause() { emulator::pause_a_little(); }
inline std::uint64_t emulated_now_ns() {
  const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(since_start).count());
}

}  // namespace pyringar::cuda
