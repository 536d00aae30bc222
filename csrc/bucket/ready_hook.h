// ready_hook: hooks of the CPU engine's module tell the CUDA engine's module of a gradient.
//
// Floor     bucket: core and the standard library.
// Contract  the modules share no code, only this C structure in a capsule. note() returns false if
//           it has set a Python error.
// Threads   with the GIL held.
// Tests     tests/cuda/test_gpu_streams.py
#pragma once

namespace pyringar {

struct ReadyHook {
  static constexpr const char* kCapsule = "pyringar.ready";
  void* self;
  void (*start_step)(void* self);
  bool (*note)(void* self, int bucket, int rank, bool is_new);
};

}  // namespace pyringar
