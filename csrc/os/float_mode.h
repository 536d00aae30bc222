// float_mode: nearest rounding, denormals kept, whatever the calling thread has set.
//
// Floor     os: std; two processors' control registers, with std's slower way beside them.
// Contract  While a DefaultFloatMode lives, its thread computes by IEEE's defaults, and so do the
//           threads that it starts. torch.set_flush_denormal() and fesetround() change the calling
//           thread alone: without this, bits would depend on which thread took which block.
// Threads   one per thread; the thread that makes it destroys it. Some nanoseconds (std: 500).
// Tests     tests/cpp/stress.cpp, part float-mode
#pragma once

#include <cstdint>

#if !defined(__SSE__) && !defined(__aarch64__)
#include <cfenv>
#endif

namespace pyringar {

class DefaultFloatMode {
 public:
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

#if defined(__SSE__) || defined(__aarch64__)
  DefaultFloatMode() : before_(get()) {
    if ((before_ & kChanges) != 0) set(before_ & ~kChanges);
  }
  ~DefaultFloatMode() {
    if ((before_ & kChanges) != 0) set(before_);
  }

 private:
#if defined(__SSE__)
  using Register = unsigned;                                      // MXCSR
  static constexpr Register kChanges = 0x8000 | 0x6000 | 0x0040;  // FTZ, rounding, DAZ
  static Register get() { return __builtin_ia32_stmxcsr(); }
  static void set(Register value) { __builtin_ia32_ldmxcsr(value); }
#else
  using Register = std::uint64_t;                                       // FPCR
  static constexpr Register kChanges = 1u << 24 | 3u << 22 | 1u << 19;  // FZ, rounding, FZ16
  static Register get() {
    Register value;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set(Register value) { __asm__ __volatile__("msr fpcr, %0" : : "r"(value)); }
#endif
  const Register before_;
#else
  DefaultFloatMode() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
#endif
};

}  // namespace pyringar
