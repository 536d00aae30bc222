// runtime: RAII wrappers of the CUDA runtime: devices, streams, events, memory.
//
// Contract  A failed call raises Error of kind kCuda, with the call, the device and CUDA's reason.
//           Owners release on their device and never throw. Only devices named in calls get a
//           context. Allocations, frees, memsets and event queries do not invalidate captures of
//           other threads.
// Threads   any. The calling thread's current device is restored.
// Tests     tests/cpp/cuda_host, tests/cuda
#pragma once

#include <cuda_runtime.h>
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#endif

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>
#include <utility>

namespace pyringar::cuda {

void check(cudaError_t status, const char* call, int device = -1);

// Run body(), then end(), also after an error: later calls must wait for work of a failed body().
template <typename Body, typename End>
void run_and_always(Body&& body, End&& end) {
  try {
    body();
  } catch (...) {
    end();
    throw;
  }
  end();
}

// Makes a device current, and restores the previous device. A thread without a device counts as on
// device 0. cudaSetDevice(0) would create a context there, so the driver's context stack is used.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  enum class Way { kNone, kSet, kPush };
  Way way_ = Way::kNone;
  int before_ = 0;
};

// Allows calls in this thread that a capture of any thread would forbid.
class BesideCaptures {
 public:
  BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Deleter that frees memory on its device. If the device does not answer, the memory leaks.
struct Release {
  int device = -1;
  void (*give_back)(void*) = nullptr;
  void operator()(void* what) const;
};
using Memory = std::unique_ptr<void, Release>;

Memory device_memory(int device, std::size_t bytes);  // zeroed
// Zeroed, pinned host memory that every device can access, allocated through `device`.
Memory host_memory(int device, std::size_t bytes);

template <typename T>
T* as(const Memory& memory, std::size_t offset_bytes = 0) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(memory.get()) + offset_bytes);
}

cudaIpcMemHandle_t ipc_handle(const Memory& memory);              // memory: from device_memory()
Memory map_memory(int device, const cudaIpcMemHandle_t& handle);  // memory of another process

class Event {
 public:
  explicit Event(int device);
  void record(cudaStream_t stream) const;                 // on a stream of the same device
  void make_wait(cudaStream_t stream, int device) const;  // on a stream of any device
  bool is_done() const;                                   // invalid after a record in a capture
  void wait_for() const;                                  // blocks the host

 private:
  int device_;
  std::unique_ptr<CUevent_st, Release> event_;
};

class Stream {
 public:
  explicit Stream(int device);  // non-blocking, of the highest priority
  cudaStream_t get() const { return stream_.get(); }

 private:
  std::unique_ptr<CUstream_st, Release> stream_;
};

int num_devices();  // 0 without a driver

using CaptureId = unsigned long long;
inline constexpr CaptureId kBrokenCapture = ~CaptureId{0};  // a forbidden call broke it
CaptureId capture_of(cudaStream_t stream, int device);
inline bool is_capturing(cudaStream_t stream, int device) {
  return capture_of(stream, device) != 0;
}

// Lock for launches whose kernels wait for each other across devices: all threads enqueue them in
// one order. Also held for a DeviceGroup's allocations and frees, which would deadlock in between.
std::unique_lock<std::mutex> lock_launches();

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

void* driver_function(const char* name);

}  // namespace pyringar::cuda
