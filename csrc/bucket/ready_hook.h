// ready_hook: how hooks of the CPU engine's module tell the CUDA engine's that a gradient has come.
//
// Floor     bucket: core and the standard library.
// Contract  the two modules share no code, so they share this structure of C, in a capsule. note()
//           returns false where it has set Python's error.
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
