// flag: counters by which thread blocks wait for each other. Only this file orders memory.
//
// Units     nanoseconds on the device's global clock.
// Contract  A block that has seen a counter in block_wait() may read all data written before
//           block_fence() and signal(), and overwrite all data read before them. Counters only grow
//           (modulo 2^32). A wait ends when the counter arrives, another block fails, or the
//           counter does not change for the timeout, which one block per device reports. Loads and
//           stores bypass L1, which is not coherent.
//
//             all threads   write payload, read slots        (weak)
//             block         barrier                          block_fence()
//             thread 0      fence, acq_rel                   block_fence()
//             thread 0      store flags, relaxed             signal(): any number after one fence
//
//             thread 0      load flag, acquire               block_wait()
//             block         barrier                          block_wait()
//             all threads   read payload, write slots        (weak)
//
//           One fence by one thread is enough. A fence and a later strong write are a release
//           pattern (PTX ISA 8.8), which synchronizes with the acquire that reads the write.
//           Threads synchronize at a bar.sync (8.9.4). Causality order includes both (8.9.5,
//           8.10.6). The scope is the device if both neighbors are on it, else the system.
// Source    PTX ISA 9, chapter 8, "Memory Consistency Model". NCCL: prims_simple.h, postPeer.
// Tests     tests/cpp/cuda/ and tests/cuda; tests/test_cuda_emulated.py also checks the PTX
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

inline constexpr int kPackBytes = 16;

struct alignas(kPackBytes) Bytes16 {
  std::uint32_t word[4];
};

#if !defined(__CUDACC__)
inline void trap_unless_aligned(const void* pointer) {
  if (reinterpret_cast<std::uintptr_t>(pointer) % kPackBytes != 0) __builtin_trap();
}
#endif

// `volatile` keeps the load between the preceding wait and the following fence. The asm has no
// "memory" clobber, so that kernel arguments stay in registers.
PYRINGAR_DEVICE inline Bytes16 load16(const void* from) {
#if defined(__CUDACC__)
  Bytes16 b;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(b.word[0]), "=r"(b.word[1]), "=r"(b.word[2]), "=r"(b.word[3])
               : "l"(from));
  return b;
#else
  trap_unless_aligned(from);
  Bytes16 bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return bytes;
#endif
}

PYRINGAR_DEVICE inline void store16(Bytes16 bytes, void* to) {
#if defined(__CUDACC__)
  asm volatile("st.global.cg.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(bytes.word[0]),
               "r"(bytes.word[1]), "r"(bytes.word[2]), "r"(bytes.word[3])
               : "memory");
#else
  trap_unless_aligned(to);
  __builtin_memcpy(to, &bytes, sizeof bytes);
#endif
}

template <typename T>
PYRINGAR_DEVICE T load_element(const T* from) {
#if defined(__CUDACC__)
  T value;
  if constexpr (sizeof(T) == 8) {
    std::uint64_t bits;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(bits) : "l"(from));
    __builtin_memcpy(&value, &bits, sizeof value);
  } else if constexpr (sizeof(T) == 4) {
    std::uint32_t bits;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(bits) : "l"(from));
    __builtin_memcpy(&value, &bits, sizeof value);
  } else if constexpr (sizeof(T) == 2) {
    std::uint16_t bits;
    asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(bits) : "l"(from));
    __builtin_memcpy(&value, &bits, sizeof value);
  } else {
    std::uint32_t bits;
    asm volatile("ld.global.cg.u8 %0, [%1];" : "=r"(bits) : "l"(from));
    value = static_cast<T>(bits);
  }
  return value;
#else
  return *from;
#endif
}

// Observers of a memory order: one device's blocks, or all devices and the host.
enum class MemoryScope { kDevice, kSystem };

PYRINGAR_DEVICE inline std::uint32_t load_acquire(const std::uint32_t* word) {
#if defined(__CUDACC__)
  std::uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
#else
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
#endif
}

PYRINGAR_DEVICE inline void store_release(std::uint32_t* word, std::uint32_t value) {
#if defined(__CUDACC__)
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#else
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
#endif
}

PYRINGAR_DEVICE inline std::uint32_t load_flag(const std::uint32_t* flag, MemoryScope scope) {
#if defined(__CUDACC__)
  if (scope == MemoryScope::kSystem) return load_acquire(flag);
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
#else
  emulator::check_scope(flag, scope == MemoryScope::kSystem);
  return load_acquire(flag);
#endif
}

// A relaxed store: a fence() before it orders earlier writes.
PYRINGAR_DEVICE inline void store_flag(std::uint32_t* flag, std::uint32_t value,
                                       MemoryScope scope) {
#if defined(__CUDACC__)
  if (scope == MemoryScope::kSystem) {
    asm volatile("st.relaxed.sys.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
  } else {
    asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
  }
#else
  emulator::check_scope(flag, scope == MemoryScope::kSystem);
  if (emulator::has_fenced()) {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
  } else {
    __atomic_store_n(flag, value, __ATOMIC_RELAXED);
  }
#endif
}

PYRINGAR_DEVICE inline void fence([[maybe_unused]] MemoryScope scope) {
#if defined(__CUDACC__)
  if (scope == MemoryScope::kSystem) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  } else {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }
#else
  emulator::fence();
#endif
}

PYRINGAR_DEVICE inline bool claim(std::uint32_t* word) {
#if defined(__CUDACC__)
  return atomicCAS(word, 0u, 1u) == 0u;
#else
  std::uint32_t zero = 0;
  return __atomic_compare_exchange_n(word, &zero, 1u, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
#endif
}

// Order the block's memory accesses before later flag stores. Called by all threads of the block.
PYRINGAR_DEVICE inline void block_fence(MemoryScope scope) {
  block_barrier();
  if (thread_index() == 0) fence(scope);
}

PYRINGAR_DEVICE inline void signal(std::uint32_t* flag, std::uint32_t value, MemoryScope scope) {
  if (thread_index() == 0) store_flag(flag, value, scope);
}

inline constexpr unsigned kPollsPerTimeCheck = 64;

// Timeout added per ring step, so that the neighbor of the missing rank reports first.
inline constexpr std::uint64_t kNsPerStep = 5'000'000;

// Poll until the flag reaches `wanted`. report(failure) fills in ranks and step. For one thread.
template <typename Report>
PYRINGAR_DEVICE bool poll_flag(const std::uint32_t* flag, MemoryScope scope, std::uint32_t wanted,
                               int step, const WaitLimits& patience, Report&& report) {
  const std::uint64_t timeout_ns =
      patience.timeout_ns + static_cast<std::uint64_t>(step) * kNsPerStep;
  std::uint64_t still_since_ns = 0;  // time of the last change; 0: clock not read yet
  std::uint32_t last_seen = 0;
  for (unsigned polls = 1;; ++polls) {
    const std::uint32_t seen = load_flag(flag, scope);
    if (reached(seen, wanted)) return true;
    if (polls % kPollsPerTimeCheck != 0) continue;
    if (load_acquire(patience.gave_up) != 0) return false;
    const std::uint64_t now = now_ns();
    if (still_since_ns == 0 || seen != last_seen) {
      still_since_ns = now;
      last_seen = seen;
    }
    if (now - still_since_ns < timeout_ns) {
      poll_pause();
      continue;
    }
    if (claim(patience.gave_up)) {
      Failure& failure = *patience.failure;
      failure.seen = seen;
      failure.wanted = wanted;
      report(failure);
      store_release(&failure.is_set, 1);
    }
    return false;
  }
}

// Thread 0 polls the flag and broadcasts the result to its block.
template <typename Report>
PYRINGAR_DEVICE bool block_wait(const std::uint32_t* flag, MemoryScope scope, std::uint32_t wanted,
                                int step, const WaitLimits& patience, Report&& report) {
  const bool came = thread_index() == 0 && poll_flag(flag, scope, wanted, step, patience, report);
  return block_broadcast(came);
}

}  // namespace pyringar::cuda
