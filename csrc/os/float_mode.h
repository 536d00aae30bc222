// float_mode: nearest rounding, denormals kept, whatever the calling thread has set.
//
// Contract  While a DefaultFloatMode lives, its thread computes by IEEE's defaults, and so do the
//           threads that it starts. torch.set_flush_denormal() and fesetround() change the calling
//           thread alone: without this, bits would depend on which thread took which block.
// Threads   one per thread; the thread that makes it destroys it. Some nanoseconds.
// Tests     tests/cpp/stress.cpp, part float-mode
#pragma once

#include <cstdint>

namespace pyringar {

class DefaultFloatMode {
 public:
  DefaultFloatMode() : before_(get()) {
    if ((before_ & kChanges) != 0) set(before_ & ~kChanges);
  }
  ~DefaultFloatMode() {
    if ((before_ & kChanges) != 0) set(before_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__SSE__)
  using Register = unsigned;                                      // MXCSR
  static constexpr Register kChanges = 0x8000 | 0x6000 | 0x0040;  // FTZ, rounding, DAZ
  static Register get() { return __builtin_ia32_stmxcsr(); }
  static void set(Register value) { __builtin_ia32_ldmxcsr(value); }
#elif defined(__aarch64__)
  using Register = std::uint64_t;                                       // FPCR
  static constexpr Register kChanges = 1u << 24 | 3u << 22 | 1u << 19;  // FZ, rounding, FZ16
  static Register get() {
    Register value;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set(Register value) { __asm__ __volatile__("msr fpcr, %0" : : "r"(value)); }
#else
  using Register = unsigned;
  static constexpr Register kChanges = 0;
  static Register get() { return 0; }
  static void set(Register) {}
#endif

  const Register before_;
};

}  // namespace pyringar
