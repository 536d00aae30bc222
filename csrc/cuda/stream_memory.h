// stream_memory: 32-bit words in the host's memory that streams write, and wait for.
//
// Units     bytes.
// Contract  write_word: the word holds the value once all that is on the stream before has run and
//           can be seen from everywhere (the driver's default flag fences). await_word: what comes
//           after on the stream runs once (int32_t)(*addr - value) >= 0. A word that the host
//           writes counts as one that a stream wrote: so a wait whose writer is gone is ended. A
//           wait without a write never ends: cuda_process/staging.h says why ours end. The
//           operations are found in the driver through the runtime; one that refuses them, or
//           memory that it does not register, is an Error of kind kUnsupported.
// Threads   any.
// Source    CUDA Driver API, Stream Memory Operations
// Tests     tests/cpp/cuda_processes
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace pyringar::cuda {

using Word = std::atomic<std::uint32_t>;

// Host memory of the caller's that every device sees, while this is there.
class RegisteredMemory {
 public:
  // device: the one whose streams write and wait. memory: whole pages.
  RegisteredMemory(int device, void* memory, std::size_t bytes);
  ~RegisteredMemory();
  RegisteredMemory(const RegisteredMemory&) = delete;
  RegisteredMemory& operator=(const RegisteredMemory&) = delete;

  // word: lies in the memory.
  void write_word(const Word& word, std::uint32_t value, cudaStream_t stream) const;
  void await_word(const Word& word, std::uint32_t value, cudaStream_t stream) const;

 private:
  std::uintptr_t on_device(const Word& word) const;

  const int device_;
  void* const memory_;
  std::uintptr_t device_memory_ = 0;  // as the device sees it
};

}  // namespace pyringar::cuda
