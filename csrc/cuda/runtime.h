// runtime: the CUDA runtime with owners and exceptions: devices, streams, events, memory.
//
// Contract  every failed call is an Error of kind kCuda that names the call, the device and CUDA's
//           reason. Owners release on the device they were made on and never throw.
// Threads   any; the current device of the calling thread is left as it was.
// Tests     tests/cuda
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>

namespace pyringar::cuda {

void check(cudaError_t status, const char* call, int device = -1);

// Makes a device current, and the one before it again.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// Stays until the process ends when its device does not answer any more.
struct Release {
  int device = -1;  // of the host's memory: none
  void operator()(void* memory) const;
};
using Memory = std::unique_ptr<void, Release>;

Memory device_memory(int device, std::size_t bytes);  // zeroed
Memory host_memory(std::size_t bytes);                // zeroed; pinned, and every device sees it

template <typename T>
T* as(const Memory& memory, std::size_t offset_bytes = 0) {
  return reinterpret_cast<T*>(static_cast<std::byte*>(memory.get()) + offset_bytes);
}

// Memory of another process, mapped into this one.
struct Unmap {
  int device = -1;
  void operator()(void* memory) const;
};
using MappedMemory = std::unique_ptr<void, Unmap>;

cudaIpcMemHandle_t ipc_handle(const Memory& memory);  // what device_memory() made
MappedMemory map_memory(int device, const cudaIpcMemHandle_t& handle);

enum class Visible { kHere, kToProcesses };

// Of a stream or an event.
struct Destroy {
  void operator()(cudaEvent_t event) const { cudaEventDestroy(event); }
  void operator()(cudaStream_t stream) const { cudaStreamDestroy(stream); }
};

class Event {
 public:
  explicit Event(int device, Visible visible = Visible::kHere);
  // What another process made, for processes.
  Event(int device, const cudaIpcEventHandle_t& handle);
  void record(cudaStream_t stream) const;                 // a stream of the same device
  void make_wait(cudaStream_t stream, int device) const;  // a stream of any device
  bool is_done() const;  // one that was recorded in a capture counts as done
  cudaIpcEventHandle_t ipc_handle() const;

 private:
  int device_;
  std::unique_ptr<CUevent_st, Destroy> event_;
};

class Stream {
 public:
  explicit Stream(int device);  // of the highest priority, not ordered with the default stream
  cudaStream_t get() const { return stream_.get(); }

 private:
  std::unique_ptr<CUstream_st, Destroy> stream_;
};

int num_devices();  // 0 without a driver
bool is_capturing(cudaStream_t stream, int device);

}  // namespace pyringar::cuda
