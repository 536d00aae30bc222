// copy: bytes between a rank's own memory and slots that other cores read and write.
//
// Contract  Like memcpy; from and to do not overlap. `rep movsb`, which announces whole lines,
//           stores to lines that another core has read at 90 GB/s in place of 35; reading lines
//           that another core has written is the other way round.
// Threads   pure functions of their arguments.
// Source    measured on two cores of an AMD EPYC (Zen 5); see benchmarks/processes.py
// Tests     tests/cpp/process_test.cpp
#pragma once

#include <cstddef>

#include "cpu/kernels.h"

namespace pyringar {

inline void copy_from_slot(void* to, const void* from, std::size_t bytes) {
  kernels(DType::kUInt8, ReduceOp::kSum).fused(&from, 1, &to, 1, bytes, 1);
}

// Sanitizers do not see what assembly does.
#if defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer)
#define PYRINGAR_SANITIZED 1
#endif
#elif defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define PYRINGAR_SANITIZED 1
#endif

inline void copy_to_slot(void* to, const void* from, std::size_t bytes) {
#if defined(__x86_64__) && !defined(PYRINGAR_SANITIZED)
  constexpr std::size_t kWorthStarting = 16 * 1024;
  if (bytes >= kWorthStarting) {
    __asm__ __volatile__("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
    return;
  }
#endif
  copy_from_slot(to, from, bytes);
}

}  // namespace pyringar
