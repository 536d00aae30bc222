// stream_memory: registration, and the driver's two operations.

#include "cuda/stream_memory.h"

#include <cuda.h>

#include "core/error.h"
#include "cuda/runtime.h"

namespace pyringar::cuda {

namespace {

using Operation = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

Operation operation(const char* name) { return reinterpret_cast<Operation>(driver_function(name)); }

// The runtime's error codes are the driver's.
void check_operation(CUresult status, const char* name, int device) {
  if (status == CUDA_ERROR_NOT_SUPPORTED) {
    fail(ErrorKind::kUnsupported, "cuda:", device, " has no stream memory operations (", name,
         " is refused): its streams cannot wait for other processes");
  }
  check(static_cast<cudaError_t>(status), name, device);
}

}  // namespace

RegisteredMemory::RegisteredMemory(int device, void* memory, std::size_t bytes)
    : device_(device), memory_(memory) {
  const OnDevice guard(device);
  const BesideCaptures beside;
  const cudaError_t status =
      cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (status != cudaSuccess) {
    cudaGetLastError();
    fail(ErrorKind::kUnsupported, "cuda:", device, " cannot reach the memory that processes share",
         " (cudaHostRegister of ", bytes, " bytes: ", cudaGetErrorString(status), ")");
  }
  void* there = nullptr;
  const cudaError_t mapped = cudaHostGetDevicePointer(&there, memory, 0);
  if (mapped != cudaSuccess) cudaHostUnregister(memory);
  check(mapped, "cudaHostGetDevicePointer", device);
  device_memory_ = reinterpret_cast<std::uintptr_t>(there);
}

RegisteredMemory::~RegisteredMemory() {
  try {
    const OnDevice guard(device_);
    const BesideCaptures beside;
    cudaHostUnregister(memory_);
  } catch (const Error&) {  // the device does not answer any more
  }
}

std::uintptr_t RegisteredMemory::on_device(const Word& word) const {
  return device_memory_ +
         (reinterpret_cast<std::uintptr_t>(&word) - reinterpret_cast<std::uintptr_t>(memory_));
}

void RegisteredMemory::write_word(const Word& word, std::uint32_t value,
                                  cudaStream_t stream) const {
  static const Operation write = operation("cuStreamWriteValue32");
  const OnDevice guard(device_);  // the null stream is the current device's
  check_operation(write(stream, on_device(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
                  "cuStreamWriteValue32", device_);
}

void RegisteredMemory::await_word(const Word& word, std::uint32_t value,
                                  cudaStream_t stream) const {
  static const Operation wait = operation("cuStreamWaitValue32");
  const OnDevice guard(device_);
  check_operation(wait(stream, on_device(word), value, CU_STREAM_WAIT_VALUE_GEQ),
                  "cuStreamWaitValue32", device_);
}

}  // namespace pyringar::cuda
