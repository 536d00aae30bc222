// cuda_emulator: the functions of cuda/device.cuh on CPU threads, for the kernels' own source.
//
// Contract  One CPU thread per CUDA thread. All threads of a launch run at once, with random delays
//           and one barrier per block. Launches of one stream run in order, streams run
//           concurrently. ThreadSanitizer checks the order that kernels establish. Warps, caches
//           and a memory weaker than the CPU's are not emulated.
// Threads   thread_index() and block_index() are those of the calling thread.
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

// Scheduler of CUDA threads that run as fibers: yields at waits, and tells the time.
class FiberScheduler {
 public:
  virtual ~FiberScheduler() = default;
  virtual void wait_for_block() = 0;
  virtual void pause() = 0;
  virtual std::uint64_t now_ns() = 0;
};

struct alignas(16) BlockShared {
  std::byte bytes[512];  // shared memory for one object of any type
  bool broadcast[2];
};

// Position of the calling thread. Zeroes on threads that run no kernel.
struct ThreadPosition {
  unsigned thread;
  unsigned num_threads;
  unsigned block;
  unsigned num_blocks;
  BlockShared* shared;
  std::barrier<>* barrier;  // null in run_sequentially()
  stress::Random* random;   // for delays
  int device = 0;
  bool has_fenced = false;  // true: fence() was called since the block's last barrier
  unsigned num_broadcasts = 0;
  FiberScheduler* scheduler = nullptr;  // null: one CPU thread per CUDA thread
};
inline thread_local constinit ThreadPosition here{};

struct Launch {
  unsigned num_blocks;
  unsigned num_threads;
  std::function<void()> kernel;
  int device = 0;
};

// Run all threads of a launch one after the other, for kernels that do not wait.
void run_sequentially(const Launch& launch);

// Run one stream per device, all streams at once, with random delays.
void run_streams(stress::Random& random, const std::vector<std::vector<Launch>>& streams);

void wait_for_block();
void pause_a_little();
std::uint64_t now_ns();

// ThreadSanitizer does not model fences: here, stores after a fence are releases.
inline void fence() { here.has_fenced = true; }
inline bool has_fenced() { return here.has_fenced; }

// Check that a flag between devices has system scope. Spare words beside the flag record its users.
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
// Alternate between two variables, since other threads may still read the previous broadcast.
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
