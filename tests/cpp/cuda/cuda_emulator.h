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

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#define PYRINGAR_DEVICE
#define PYRINGAR_KERNEL(threads, blocks) void
#define PYRINGAR_KERNEL_ARG const

namespace pyringar::stress {
class Random;
}

namespace pyringar::emulator {

// Where CUDA threads are not threads: who runs when they wait, and what time it is.
class FiberScheduler {
 public:
  virtual ~FiberScheduler() = default;
  virtual void wait_for_block() = 0;
  virtual void pause() = 0;
  virtual std::uint64_t now_ns() = 0;
};

// What the threads of a block share.
struct alignas(16) BlockShared {
  std::byte bytes[512];  // one object, of any type
  bool broadcast[2];
};

// Where the calling thread is. Zeroes on threads that run no kernel.
struct ThreadPosition {
  unsigned thread;
  unsigned num_threads;
  unsigned block;
  unsigned num_blocks;
  BlockShared* shared;
  std::barrier<>* barrier;  // none where threads run in turn
  stress::Random* random;   // for delays
  int device = 0;
  bool has_fenced = false;  // since the last barrier of the block
  unsigned num_broadcasts = 0;
  FiberScheduler* scheduler = nullptr;  // or none: a CPU thread each
};
inline thread_local constinit ThreadPosition here{};

struct Launch {
  unsigned num_blocks;
  unsigned num_threads;
  std::function<void()> kernel;
  int device = 0;
};

// For kernels whose threads do not wait for each other: all of them in turn, on this thread.
void run_sequentially(const Launch& launch);

// A stream per device, all streams at once, with random delays.
void run_streams(stress::Random& random, const std::vector<std::vector<Launch>>& streams);

void wait_for_block();
void pause_a_little();
std::uint64_t now_ns();

// A fence is broadcast to ThreadSanitizer, which knows none, by the stores behind it: those are
// releases until the next barrier, after which the fence says nothing of what other threads did.
inline void fence() { here.has_fenced = true; }
inline bool has_fenced() { return here.has_fenced; }

// Words of a flag's line that kernels leave alone say which devices have used it, and how.
void check_scope(const std::uint32_t* flag, bool is_system);

}  // namespace pyringar::emulator

namespace pyringar::cuda {

inline unsigned thread_index() { return emulator::here.thread; }
inline unsigned num_threads() { return emulator::here.num_threads; }
template <unsigned>
unsigned num_threads() {
  return num_threads();
}
inline unsigned block_index() { return emulator::here.block; }
inline unsigned num_blocks() { return emulator::here.num_blocks; }
inline void block_barrier() { emulator::wait_for_block(); }
// Two answers in turn: nobody writes the one that others may still read.
inline bool block_broadcast(bool by_thread_0) {
  bool& broadcast = emulator::here.shared->broadcast[emulator::here.num_broadcasts++ % 2];
  if (thread_index() == 0) broadcast = by_thread_0;
  emulator::wait_for_block();
  return broadcast;
}
template <typename T>
T& block_shared() {
  static_assert(sizeof(T) <= sizeof(emulator::BlockShared::bytes) && alignof(T) <= 16);
  return *reinterpret_cast<T*>(emulator::here.shared->bytes);
}
inline void poll_pause() { emulator::pause_a_little(); }
inline std::uint64_t emulated_now_ns() { return emulator::now_ns(); }

}  // namespace pyringar::cuda
