// cuda_ready_events: cuda::ReadyEvents for Python and for the bucketer's hooks.
//
// Threads   with the GIL held.
// Tests     tests/cuda/test_gpu_streams.py, tests/test_cuda_processes.py
#pragma once

#include <utility>
#include <vector>

#include "bindings/group_binding.h"
#include "bucket/step.h"
#include "cuda/background.h"

namespace pyringar {

// Python's ReadyEvents: gradient hooks record events on the current stream of their thread.
class BoundReadyEvents {
 public:
  BoundReadyEvents(const std::vector<int>& devices, std::vector<int> bucket_sizes)
      : ready_(devices, std::move(bucket_sizes)) {}

  cuda::BucketReady bucket(int index) const { return {&ready_, index}; }
  // Make the current stream of the rank's device wait for the bucket's gradients.
  void make_wait(int bucket, int rank) const {
    const int device = ready_.device_of(rank);
    if (device == kHost) return;
    ready_.make_wait(bucket, device, static_cast<cudaStream_t>(current_stream(device)));
  }
  py::capsule hook() { return py::capsule(&hook_, ReadyHook::kCapsule); }

 private:
  static bool note(void* self, int bucket, int rank, bool is_new) {
    try {
      cuda::ReadyEvents& ready = static_cast<BoundReadyEvents*>(self)->ready_;
      const int device = ready.device_of(rank);
      if (device == kHost) return true;
      const auto stream = static_cast<cudaStream_t>(current_stream(device));
      ready.note(bucket, rank, is_new, stream);
      return true;
    } catch (...) {
      set_python_error(std::current_exception());
      return false;
    }
  }

  cuda::ReadyEvents ready_;
  const ReadyHook hook_{
      this, [](void* self) { static_cast<BoundReadyEvents*>(self)->ready_.start_step(); }, &note};
};

}  // namespace pyringar
