// runtime: the CUDA runtime with owners and exceptions: devices, streams, events, memory.
//
// Contract  every failed call is an Error of kind kCuda that names the call, the device and CUDA's
//           reason. Owners release on the device they were made on and never throw. Only devices
//           named here get a context. Captures of other threads go on while memory is allocated,
//           freed and cleared and events are queried.
// Threads   any; the current device of the calling thread is left as it was.
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

// What was enqueued before an error runs, and others must come after it all the same.
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

// Makes a device current, and the one before it again. A thread that has used no device yet counts
// as on device 0, where cudaSetDevice would make a context: there it goes by the driver's stack.
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

// While it lives this thread may do what a capture of any thread would otherwise forbid.
class BesideCaptures {
 public:
  BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~BesideCaptures() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Gives back on the device; it stays when the device does not answer any more.
struct Release {
  int device = -1;
  void (*give_back)(void*) = nullptr;
  void operator()(void* what) const;
};
using Memory = std::unique_ptr<void, Release>;

Memory device_memory(int device, std::size_t bytes);  // zeroed
// Zeroed, pinned, and seen by every device; made by way of this one.
Memory host_memory(int device, std::size_t bytes);

template <typename T>
T* as(const Memory& memory, std::size_t offset_bytes = 0) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(memory.get()) + offset_bytes);
}

cudaIpcMemHandle_t ipc_handle(const Memory& memory);              // what device_memory() made
Memory map_memory(int device, const cudaIpcMemHandle_t& handle);  // of another process

class Event {
 public:
  explicit Event(int device);
  void record(cudaStream_t stream) const;                 // a stream of the same device
  void make_wait(cudaStream_t stream, int device) const;  // a stream of any device
  bool is_done() const;   // not for one that was recorded in a capture
  void wait_for() const;  // on the host

 private:
  int device_;
  std::unique_ptr<CUevent_st, Release> event_;
};

class Stream {
 public:
  explicit Stream(int device);  // of the highest priority, not ordered with the default stream
  cudaStream_t get() const { return stream_.get(); }

 private:
  std::unique_ptr<CUstream_st, Release> stream_;
};

int num_devices();  // 0 without a driver

using CaptureId = unsigned long long;
inline constexpr CaptureId kBrokenCapture = ~CaptureId{0};  // a call that it forbids has ended it
CaptureId capture_of(cudaStream_t stream, int device);
inline bool is_capturing(cudaStream_t stream, int device) {
  return capture_of(stream, device) != 0;
}

// Held while launches that wait for each other across devices are enqueued, in one order; and while
// a Group allocates or frees memory, which would deadlock between two launches of a call.
std::unique_lock<std::mutex> lock_launches();

// Names what a thread does, for profilers: Nsight Systems shows a bar (NVTX).
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

// A function of the driver, which this library does not link against.
void* driver_function(const char* name);

}  // namespace pyringar::cuda
