// float_mode: round to nearest and keep denormals, regardless of the thread's settings.
// Contract  While a DefaultFloatMode exists, its thread computes in the IEEE default mode, as do
//           threads that it starts. torch.set_flush_denormal() and fesetround() set the calling
//           thread only: without this class, bits would depend on which thread reduced a block.
// Threads   Construct and destroy it on one thread. Costs some nanoseconds.
// Tests     tests/conformance/test_layouts.py, tests/test_torch_team.py
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
  static constexpr Register kChanges = 0x8000 | 0x6000 | 0x0040;  // bits FTZ, rounding, DAZ
  static Register get() { return __builtin_ia32_stmxcsr(); }
  static void set(Register value) { __builtin_ia32_ldmxcsr(value); }
#elif defined(__aarch64__)
  using Register = std::uint64_t;                                       // FPCR
  static constexpr Register kChanges = 1u << 24 | 3u << 22 | 1u << 19;  // bits FZ, rounding, FZ16
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
