// flag: the one file of the CUDA engine that knows memory order, and how long a kernel waits.
//
// Floor     cuda: device code. Without nvcc the same lines compile for host threads, which is how
//           the kernels run under ThreadSanitizer.
// Units     nanoseconds on the device's global clock.
// Contract  signal() publishes everything that the threads of the block wrote before it, to every
//           device and to the host; whoever has seen it through wait() reads what was written.
//           Counters only grow (modulo 2^32). A wait ends: with the counter, with somebody else's
//           failure, or when nothing that is waited for has moved for the timeout (a little longer
//           for later steps, see kNsPerStep), which is reported once per device. Who works for
//           long between two signals says that it is under way, by progressed().
//
//             all threads   write payload, fence (system)        one thread's fence alone orders
//             block         barrier                              its own writes; barrier and fence
//             thread 0      store flag, release, system scope    together order all of them
//
//             thread 0      load flag, acquire, system scope     the acquire also drops what the
//             block         barrier                              multiprocessor's L1 has kept
//             all threads   read payload, past L1
// Source    PTX ISA, memory consistency model: release and acquire patterns, causality order.
// Tests     tests/cpp/cuda/, tests/cuda
#pragma once

#include <cstdint>

#include "cuda/args.h"
#include "cuda/device.cuh"

namespace pyringar::cuda {

PYRINGAR_DEVICE inline std::uint64_t now_ns() {
#if defined(__CUDACC__)
  std::uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
#else
  return emulated_now_ns();
#endif
}

PYRINGAR_DEVICE inline std::uint32_t load_acquire(const std::uint32_t* flag) {
#if defined(__CUDA_ARCH__)
  std::uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
#else
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
#endif
}

PYRINGAR_DEVICE inline void store_release(std::uint32_t* flag, std::uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
#else
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
#endif
}

PYRINGAR_DEVICE inline void fence_system() {
#if defined(__CUDA_ARCH__)
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#else
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}

// True for the first caller on this device.
PYRINGAR_DEVICE inline bool claim(std::uint32_t* word) {
#if defined(__CUDA_ARCH__)
  return atomicCAS(word, 0u, 1u) == 0u;
#else
  std::uint32_t zero = 0;
  return __atomic_compare_exchange_n(word, &zero, 1u, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
#endif
}

// Everything the block wrote, then the flag. Called by all threads of the block.
PYRINGAR_DEVICE inline void signal(std::uint32_t* flag, std::uint32_t value) {
  fence_system();
  block_barrier();
  if (thread_index() == 0) store_release(flag, value);
}

// The block has read everything it was to read, and wrote nothing that the other side reads.
PYRINGAR_DEVICE inline void acknowledge(std::uint32_t* flag, std::uint32_t value) {
  block_barrier();
  if (thread_index() == 0) store_release(flag, value);
}

// Beside a flag, on its line: how often its writer has said that it is under way. It orders
// nothing.
PYRINGAR_DEVICE inline void progressed(std::uint32_t* flag, std::uint32_t count) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(flag + 1), "r"(count) : "memory");
#else
  __atomic_store_n(flag + 1, count, __ATOMIC_RELAXED);
#endif
}

PYRINGAR_DEVICE inline std::uint32_t progress_of(const std::uint32_t* flag) {
#if defined(__CUDA_ARCH__)
  std::uint32_t count;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(count) : "l"(flag + 1) : "memory");
  return count;
#else
  return __atomic_load_n(flag + 1, __ATOMIC_RELAXED);
#endif
}

// Looks at the clock, at others' failures and at the writer's progress only every so often.
inline constexpr unsigned kSpinsPerLook = 64;

// Ranks that all began to wait together would give up together, but only one reports: it should be
// the culprit's neighbour, who waits for the earliest step, and not one who waits for that one.
inline constexpr std::uint64_t kNsPerStep = 5'000'000;

// One thread waits. `report` fills in who waited for whom.
template <typename Report>
PYRINGAR_DEVICE bool spin(const std::uint32_t* flag, std::uint32_t wanted, int step,
                          const Patience& patience, Report&& report) {
  const std::uint64_t timeout_ns =
      patience.timeout_ns + static_cast<std::uint64_t>(step) * kNsPerStep;
  std::uint64_t still_since_ns = 0;  // 0: not looked yet
  std::uint32_t last_seen = 0;
  std::uint32_t last_progress = 0;
  for (unsigned spins = 1;; ++spins) {
    const std::uint32_t seen = load_acquire(flag);
    if (reached(seen, wanted)) return true;
    if (spins % kSpinsPerLook != 0) continue;
    if (load_acquire(patience.gave_up) != 0) return false;
    const std::uint64_t now = now_ns();
    const std::uint32_t progress = progress_of(flag);
    if (still_since_ns == 0 || seen != last_seen || progress != last_progress) {
      still_since_ns = now;
      last_seen = seen;
      last_progress = progress;
    }
    if (now - still_since_ns < timeout_ns) {
      spin_pause();
      continue;
    }
    if (claim(patience.gave_up)) {
      Failure& failure = *patience.failure;
      failure.seen = seen;
      failure.wanted = wanted;
      report(failure);
      fence_system();
      store_release(&failure.is_set, 1);
    }
    return false;
  }
}

// A block's waits: thread 0 looks, all learn. Two answers in turn, so that one barrier is enough.
class BlockWaits {
 public:
  PYRINGAR_DEVICE BlockWaits(const Patience& patience, std::uint32_t* two_shared_words)
      : patience_(patience), answers_(two_shared_words) {}

  template <typename Report>
  PYRINGAR_DEVICE bool wait(const std::uint32_t* flag, std::uint32_t wanted, int step,
                            Report&& report) {
    turn_ ^= 1;
    if (thread_index() == 0) {
      answers_[turn_] = spin(flag, wanted, step, patience_, report) ? 1u : 0u;
    }
    block_barrier();
    return answers_[turn_] != 0;
  }

 private:
  const Patience& patience_;
  std::uint32_t* const answers_;
  int turn_ = 0;
};

}  // namespace pyringar::cuda
