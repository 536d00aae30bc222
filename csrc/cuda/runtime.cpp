// runtime: see the header.
//
// Floor     cuda
// Tests     tests/cuda

#include "cuda/runtime.h"

#include <utility>

#include "core/error.h"

namespace pyringar::cuda {

void check(cudaError_t status, const char* call, int device) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // not sticky: the next call shall not be blamed for this one
  const std::string where = device < 0 ? "" : join(" on cuda:", device);
  fail(ErrorKind::kCuda, call, where, ": ", cudaGetErrorString(status), " (",
       cudaGetErrorName(status), ")");
}

OnDevice::OnDevice(int device) {
  check(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice", device);
}

OnDevice::~OnDevice() {
  int now = before_;
  if (cudaGetDevice(&now) == cudaSuccess && now != before_) cudaSetDevice(before_);
}

void Release::operator()(void* memory) const {
  if (device < 0) {
    cudaFreeHost(memory);
    return;
  }
  int before = device;
  cudaGetDevice(&before);
  cudaSetDevice(device);
  cudaFree(memory);
  cudaSetDevice(before);
}

Memory device_memory(int device, std::size_t bytes) {
  const OnDevice guard(device);
  void* raw = nullptr;
  check(cudaMalloc(&raw, bytes), "cudaMalloc", device);
  Memory memory(raw, Release{device});
  check(cudaMemset(raw, 0, bytes), "cudaMemset", device);
  // A memset of device memory may return before it is done, and our kernels run on other streams.
  check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize", device);
  return memory;
}

Memory host_memory(std::size_t bytes) {
  void* raw = nullptr;
  check(cudaHostAlloc(&raw, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
  Memory memory(raw, Release{});
  __builtin_memset(raw, 0, bytes);
  return memory;
}

void Unmap::operator()(void* memory) const {
  int before = device;
  cudaGetDevice(&before);
  cudaSetDevice(device);
  cudaIpcCloseMemHandle(memory);
  cudaSetDevice(before);
}

cudaIpcMemHandle_t ipc_handle(const Memory& memory) {
  const int device = memory.get_deleter().device;
  const OnDevice guard(device);
  cudaIpcMemHandle_t handle{};
  check(cudaIpcGetMemHandle(&handle, memory.get()), "cudaIpcGetMemHandle", device);
  return handle;
}

MappedMemory map_memory(int device, const cudaIpcMemHandle_t& handle) {
  const OnDevice guard(device);
  void* raw = nullptr;
  check(cudaIpcOpenMemHandle(&raw, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle",
        device);
  return {raw, Unmap{device}};
}

Event::Event(int device, Visible visible) : device_(device) {
  const OnDevice guard(device);
  const unsigned flags =
      cudaEventDisableTiming | (visible == Visible::kToProcesses ? cudaEventInterprocess : 0u);
  check(cudaEventCreateWithFlags(&event_, flags), "cudaEventCreate", device);
}

Event::Event(int device, const cudaIpcEventHandle_t& handle) : device_(device) {
  const OnDevice guard(device);
  check(cudaIpcOpenEventHandle(&event_, handle), "cudaIpcOpenEventHandle", device);
}

cudaIpcEventHandle_t Event::ipc_handle() const {
  const OnDevice guard(device_);
  cudaIpcEventHandle_t handle{};
  check(cudaIpcGetEventHandle(&handle, event_), "cudaIpcGetEventHandle", device_);
  return handle;
}

Event::~Event() {
  if (event_ != nullptr) cudaEventDestroy(event_);
}

Event::Event(Event&& other) noexcept
    : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}

void Event::record(cudaStream_t stream) const {
  const OnDevice guard(device_);
  check(cudaEventRecord(event_, stream), "cudaEventRecord", device_);
}

void Event::make_wait(cudaStream_t stream, int device) const {
  const OnDevice guard(device);  // the null stream is the current device's
  check(cudaStreamWaitEvent(stream, event_, 0), "cudaStreamWaitEvent", device);
}

bool Event::is_done() const {
  const cudaError_t status = cudaEventQuery(event_);
  if (status == cudaErrorNotReady || status == cudaErrorCapturedEvent) {
    cudaGetLastError();
    return status == cudaErrorCapturedEvent;
  }
  check(status, "cudaEventQuery", device_);
  return true;
}

void Event::synchronize() const {
  check(cudaEventSynchronize(event_), "cudaEventSynchronize", device_);
}

Stream::Stream(int device) : device_(device) {
  const OnDevice guard(device);
  int lowest = 0;
  int highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange",
        device);
  check(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest),
        "cudaStreamCreateWithPriority", device);
}

Stream::~Stream() {
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

Stream::Stream(Stream&& other) noexcept
    : device_(other.device_), stream_(std::exchange(other.stream_, nullptr)) {}

int num_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

bool is_capturing(cudaStream_t stream, int device) {
  const OnDevice guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace pyringar::cuda
