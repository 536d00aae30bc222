// runtime: error messages, current devices, memory, events and streams.
#include "cuda/runtime.h"

#include <cuda.h>

#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/error.h"

namespace pyringar::cuda {

namespace {

// True if every later CUDA call of the process fails.
bool is_sticky(cudaError_t status) {
  switch (status) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

void check_driver(CUresult status, const char* call, int device) {
  if (status == CUDA_SUCCESS) return;
  fail(ErrorKind::kCuda, call, " on cuda:", device, ": error ", static_cast<int>(status));
}

bool has_context(int device) {
  static const auto get_state = reinterpret_cast<decltype(&cuDevicePrimaryCtxGetState)>(
      driver_function("cuDevicePrimaryCtxGetState"));
  unsigned flags = 0;
  int is_active = 0;
  return get_state(device, &flags, &is_active) == CUDA_SUCCESS && is_active != 0;
}

// The runtime's primary context of the device, retained until the process ends.
CUcontext context_of(int device) {
  static const auto retain = reinterpret_cast<decltype(&cuDevicePrimaryCtxRetain)>(
      driver_function("cuDevicePrimaryCtxRetain"));
  static std::mutex mutex;
  static std::map<int, CUcontext> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find(device);
  if (found != known.end()) return found->second;
  CUcontext context = nullptr;
  check_driver(retain(&context, device), "cuDevicePrimaryCtxRetain", device);
  return known.emplace(device, context).first->second;
}

void push_context(int device) {
  static const auto push =
      reinterpret_cast<CUresult (*)(CUcontext)>(driver_function("cuCtxPushCurrent"));
  check_driver(push(context_of(device)), "cuCtxPushCurrent", device);
}

void pop_context() {
  static const auto pop =
      reinterpret_cast<CUresult (*)(CUcontext*)>(driver_function("cuCtxPopCurrent"));
  CUcontext popped = nullptr;
  pop(&popped);
}

}  // namespace

void check(cudaError_t status, const char* call, int device) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // clear the error, or the next call reports it
  const std::string where = device < 0 ? "" : join(" on cuda:", device);
  const char* advice =
      is_sticky(status)
          ? "; a kernel of this process has failed, perhaps an earlier one of another library, and "
            "every call fails until the process is restarted"
          : "";
  fail(ErrorKind::kCuda, call, where, ": ", cudaGetErrorString(status), " (",
       cudaGetErrorName(status), ")", advice);
}

void* driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found), name);
#else
  check(cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found), name);
#endif
  if (entry == nullptr) fail(ErrorKind::kCuda, "the CUDA driver has no ", name);
  return entry;
}

OnDevice::OnDevice(int device) {
  check(cudaGetDevice(&before_), "cudaGetDevice");
  if (before_ == device) return;
  if (has_context(before_)) {
    check(cudaSetDevice(device), "cudaSetDevice", device);
    way_ = Way::kSet;
  } else {
    push_context(device);
    way_ = Way::kPush;
  }
}

OnDevice::~OnDevice() {
  if (way_ == Way::kSet) cudaSetDevice(before_);
  if (way_ == Way::kPush) pop_context();
}

void Release::operator()(void* what) const {
  try {
    const OnDevice guard(device);
    const BesideCaptures beside;
    give_back(what);
  } catch (const Error&) {  // leak: the device does not answer
  }
}

Memory device_memory(int device, std::size_t bytes) {
  const OnDevice guard(device);
  const BesideCaptures beside;
  void* raw = nullptr;
  check(cudaMalloc(&raw, bytes), "cudaMalloc", device);
  Memory memory(raw, Release{device, [](void* it) { cudaFree(it); }});
  // Not the default stream, which would synchronize with captured streams.
  const Stream stream(device);
  check(cudaMemsetAsync(raw, 0, bytes, stream.get()), "cudaMemsetAsync", device);
  check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize", device);
  return memory;
}

Memory host_memory(int device, std::size_t bytes) {
  const OnDevice guard(device);
  const BesideCaptures beside;
  void* raw = nullptr;
  check(cudaHostAlloc(&raw, bytes, cudaHostAllocPortable | cudaHostAllocMapped), "cudaHostAlloc");
  Memory memory(raw, Release{device, [](void* it) { cudaFreeHost(it); }});
  __builtin_memset(raw, 0, bytes);
  return memory;
}

cudaIpcMemHandle_t ipc_handle(const Memory& memory) {
  const int device = memory.get_deleter().device;
  const OnDevice guard(device);
  const BesideCaptures beside;
  cudaIpcMemHandle_t handle{};
  check(cudaIpcGetMemHandle(&handle, memory.get()), "cudaIpcGetMemHandle", device);
  return handle;
}

Memory map_memory(int device, const cudaIpcMemHandle_t& handle) {
  const OnDevice guard(device);
  const BesideCaptures beside;
  void* raw = nullptr;
  check(cudaIpcOpenMemHandle(&raw, handle, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle",
        device);
  return {raw, Release{device, [](void* it) { cudaIpcCloseMemHandle(it); }}};
}

Event::Event(int device) : device_(device) {
  const OnDevice guard(device);
  cudaEvent_t made = nullptr;
  check(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "cudaEventCreate", device);
  event_ = {made,
            Release{device, [](void* it) { cudaEventDestroy(static_cast<cudaEvent_t>(it)); }}};
}

void Event::record(cudaStream_t stream) const {
  const OnDevice guard(device_);
  check(cudaEventRecord(event_.get(), stream), "cudaEventRecord", device_);
}

void Event::make_wait(cudaStream_t stream, int device) const {
  const OnDevice guard(device);  // the null stream belongs to the current device
  check(cudaStreamWaitEvent(stream, event_.get(), 0), "cudaStreamWaitEvent", device);
}

bool Event::is_done() const {
  const OnDevice guard(device_);
  const BesideCaptures beside;
  const cudaError_t status = cudaEventQuery(event_.get());
  if (status == cudaErrorNotReady) {
    cudaGetLastError();
    return false;
  }
  check(status, "cudaEventQuery", device_);
  return true;
}

void Event::wait_for() const {
  const OnDevice guard(device_);
  const BesideCaptures beside;
  check(cudaEventSynchronize(event_.get()), "cudaEventSynchronize", device_);
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
  stream_ = {made,
             Release{device, [](void* it) { cudaStreamDestroy(static_cast<cudaStream_t>(it)); }}};
}

int num_devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

CaptureId capture_of(cudaStream_t stream, int device) {
  const OnDevice guard(device);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CaptureId id = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &id), "cudaStreamGetCaptureInfo", device);
  if (status == cudaStreamCaptureStatusInvalidated) return kBrokenCapture;
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

std::unique_lock<std::mutex> lock_launches() {
  static auto* mutex = new std::mutex;  // leaked: needed while the process exits
  return std::unique_lock<std::mutex>(*mutex);
}

}  // namespace pyringar::cuda
