// stream_memory: 32-bit words in the host's memory that streams write, and wait for.
//
// Units     bytes.
// Contract  write_word: the word holds the value once all that is on the stream before has run and
//           can be seen from everywhere; the driver's default flag brings that fence, "which has
//           similar semantics" to a fence of the system, "but is scoped to the stream" (cuda.h,
//           CUstreamWriteValue_flags). await_word: what comes after on the stream runs once
//           `(int32_t)(*addr - value) >= 0, a cyclic greater-or-equal` (cuStreamWaitValue32).
//           A word that is written by the host counts as one that a stream wrote: that is how a
//           wait whose writer is gone is ended.
//           The operations are the driver's, found through the runtime, so that nothing links
//           libcuda. Their second version, of CUDA 11.7, is there without being asked for; the
//           attribute that says so was the first version's. A driver that refuses them all the same
//           is an Error of kind kUnsupported, as is memory that it does not register.
//           A wait without a write never ends: see cuda_process/staging.h for why ours end.
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
