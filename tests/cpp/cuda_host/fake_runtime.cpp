// fake_runtime: the few functions of the CUDA runtime that csrc/cuda calls, over CPU threads.
//
// Devices are queues of kernels and copies. What is enqueued runs when somebody synchronises: all
// devices at once, each in order, kernels on the emulator's threads. Memory is the host's. One
// stream per device is all that the group is given here, so events order nothing.

#include "fake_runtime.h"

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "cuda/args.h"
#include "cuda/table.h"
#include "launched.h"

namespace pyringar::stress {

namespace {

int current = 0;
std::map<int, std::vector<emulator::Launch>> queues;
Random* delays = nullptr;

using cuda::KernelKind;

cudaError_t launch(const void* kernel, dim3 blocks, dim3 threads, void** arguments) {
  const std::optional<KernelKind> kind = kind_of(kernel);
  if (!kind) return cudaErrorInvalidDeviceFunction;
  emulator::Launch entry{blocks.x, threads.x, {}};
  switch (*kind) {
    case KernelKind::kFusedSmall:
      entry.kernel = bound<cuda::SmallTable>(kernel, arguments);
      break;
    case KernelKind::kFusedLarge:
      entry.kernel = bound<cuda::LargeTable>(kernel, arguments);
      break;
    case KernelKind::kDirectSmall:
      entry.kernel = bound<cuda::SmallTable, cuda::BarrierPorts, cuda::Patience>(kernel, arguments);
      break;
    case KernelKind::kDirectLarge:
      entry.kernel = bound<cuda::LargeTable, cuda::BarrierPorts, cuda::Patience>(kernel, arguments);
      break;
    case KernelKind::kRing:
      entry.num_threads = cuda::kThreads;
      entry.kernel = bound<cuda::RingArgs>(kernel, arguments);
      break;
  }
  queues[current].push_back(std::move(entry));
  return cudaSuccess;
}

}  // namespace

void use_delays(Random* random) { delays = random; }

void run_queues() {
  std::vector<std::vector<emulator::Launch>> streams;
  for (auto& [device, queue] : queues) streams.push_back(std::move(queue));
  queues.clear();
  emulator::run_streams(*delays, streams);
}

}  // namespace pyringar::stress

using pyringar::stress::current;
using pyringar::stress::launch;
using pyringar::stress::queues;
using pyringar::stress::run_queues;

extern "C" {

cudaError_t cudaGetDevice(int* device) { return *device = current, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return current = device, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 8, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "fake"; }
const char* cudaGetErrorName(cudaError_t) { return "fake"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = 6, cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return run_queues(), cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return run_queues(), cudaSuccess; }
cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  return *memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256), cudaSuccess;
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return cudaMalloc(memory, bytes);
}
cudaError_t cudaFree(void* memory) { return std::free(memory), cudaSuccess; }
cudaError_t cudaFreeHost(void* memory) { return std::free(memory), cudaSuccess; }
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  return std::memset(memory, value, bytes), cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  return std::memcpy(to, from, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  queues[current].push_back({1, 1, [=] { std::memcpy(to, from, bytes); }});
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments,
                             std::size_t, cudaStream_t) {
  return launch(kernel, blocks, threads, arguments);
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 blocks, dim3 threads,
                                        void** arguments, std::size_t, cudaStream_t) {
  return launch(kernel, blocks, threads, arguments);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                          std::size_t) {
  return *blocks = 1, cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = nullptr, cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  return *lowest = *highest = 0, cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return *stream = nullptr, cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

// All ranks are in one process here.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) {
  return cudaErrorNotSupported;
}
cudaError_t cudaIpcCloseMemHandle(void*) { return cudaErrorNotSupported; }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) {
  return cudaErrorNotSupported;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) {
  return cudaErrorNotSupported;
}

}  // extern "C"
