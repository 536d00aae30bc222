// runtime: see the header.
//
// Tests     tests/cuda

#include "cuda/runtime.h"

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

namespace {

// Without exceptions, for what releases.
template <typename Action>
void do_on_device(int device, Action&& action) {
  int before = device;
  cudaGetDevice(&before);
  cudaSetDevice(device);
  action();
  cudaSetDevice(before);
}

}  // namespace

void Release::operator()(void* memory) const {
  if (device < 0) {
    cudaFreeHost(memory);
  } else {
    do_on_device(device, [&] { cudaFree(memory); });
  }
}

void Unmap::operator()(void* memory) const {
  do_on_device(device, [&] { cudaIpcCloseMemHandle(memory); });
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
  cudaEvent_t made = nullptr;
  check(cudaEventCreateWithFlags(&made, flags), "cudaEventCreate", device);
  event_.reset(made);
}

Event::Event(int device, const cudaIpcEventHandle_t& handle) : device_(device) {
  const OnDevice guard(device);
  cudaEvent_t opened = nullptr;
  check(cudaIpcOpenEventHandle(&opened, handle), "cudaIpcOpenEventHandle", device);
  event_.reset(opened);
}

cudaIpcEventHandle_t Event::ipc_handle() const {
  const OnDevice guard(device_);
  cudaIpcEventHandle_t handle{};
  check(cudaIpcGetEventHandle(&handle, event_.get()), "cudaIpcGetEventHandle", device_);
  return handle;
}

void Event::record(cudaStream_t stream) const {
  const OnDevice guard(device_);
  check(cudaEventRecord(event_.get(), stream), "cudaEventRecord", device_);
}

void Event::make_wait(cudaStream_t stream, int device) const {
  const OnDevice guard(device);  // the null stream is the current device's
  check(cudaStreamWaitEvent(stream, event_.get(), 0), "cudaStreamWaitEvent", device);
}

bool Event::is_done() const {
  const cudaError_t status = cudaEventQuery(event_.get());
  if (status == cudaErrorNotReady || status == cudaErrorCapturedEvent) {
    cudaGetLastError();
    return status == cudaErrorCapturedEvent;
  }
  check(status, "cudaEventQuery", device_);
  return true;
}

Stream::Stream(int device) {
  const OnDevice guard(device);
  int lowest = 0;
  int highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange",
        device);
  cudaStream_t made = nullptr;
  check(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, highest),
        "cudaStreamCreateWithPriority", device);
  stream_.reset(made);
}

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
