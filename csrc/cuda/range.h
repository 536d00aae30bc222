// range: a name for what a thread does, for profilers (NVTX: Nsight Systems shows it as a bar).
//
// Contract  costs nanoseconds without a profiler, and nothing where the toolkit has no NVTX.
// Threads   any, each for itself.
// Source    NVTX 3, a library of headers
// Tests     tests/build/test_cuda_build.py compiles it
#pragma once

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif

namespace pyringar::cuda {

class ProfiledRange {
 public:
#if __has_include(<nvtx3/nvToolsExt.h>)
  explicit ProfiledRange(const char* name) { nvtxRangePushA(name); }
  ~ProfiledRange() { nvtxRangePop(); }
#else
  explicit ProfiledRange(const char*) {}
#endif
  ProfiledRange(const ProfiledRange&) = delete;
  ProfiledRange& operator=(const ProfiledRange&) = delete;
};

}  // namespace pyringar::cuda
