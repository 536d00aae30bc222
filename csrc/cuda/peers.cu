// peers: enables and tests peer access.
#include "cuda/peers.h"

#include <cuda.h>

#include <map>
#include <mutex>
#include <utility>

#include "cuda/flag.cuh"
#include "cuda/runtime.h"

namespace pyringar::cuda {

namespace {

constexpr int kProbeWords = 4096;
constexpr int kThreadsOfProbe = 256;

__device__ std::uint32_t pattern(std::uint32_t seed, std::uint32_t i) {
  return (seed ^ i) * 2654435761u + i;
}

// Write the pattern into the peer's memory. Count the words that read back wrong.
__global__ void probe_kernel(std::uint32_t* remote, std::uint32_t seed, std::uint32_t* wrong) {
  for (std::uint32_t i = thread_index(); i < kProbeWords; i += num_threads()) {
    remote[i] = pattern(seed, i);
  }
  fence(MemoryScope::kSystem);
  block_barrier();
  for (std::uint32_t i = thread_index(); i < kProbeWords; i += num_threads()) {
    // Read a word of another thread: this thread's word could come from a write buffer.
    const std::uint32_t other = (i + 1021) % kProbeWords;
    if (load_acquire(remote + other) != pattern(seed, other)) atomicAdd(wrong, 1u);
  }
}

__global__ void verify_kernel(const std::uint32_t* local, std::uint32_t seed,
                              std::uint32_t* wrong) {
  for (std::uint32_t i = thread_index(); i < kProbeWords; i += num_threads()) {
    if (load_acquire(local + i) != pattern(seed, i)) atomicAdd(wrong, 1u);
  }
}

std::uint32_t read_word(const Memory& word, int device, const Stream& stream) {
  const OnDevice guard(device);
  std::uint32_t value = 0;
  check(cudaMemcpyAsync(&value, word.get(), sizeof value, cudaMemcpyDeviceToHost, stream.get()),
        "cudaMemcpyAsync", device);
  check(cudaStreamSynchronize(stream.get()), "peer probe", device);
  return value;
}

bool probe(int from, int to) {
  const BesideCaptures beside;
  // Not the default stream, which would synchronize with captured streams.
  const Stream stream_from(from);
  const Stream stream_to(to);
  const Memory remote = device_memory(to, kProbeWords * sizeof(std::uint32_t));
  const Memory wrong_there = device_memory(from, sizeof(std::uint32_t));
  const Memory wrong_here = device_memory(to, sizeof(std::uint32_t));
  const auto seed = static_cast<std::uint32_t>(0x9e3779b9u * static_cast<unsigned>(from + 1) +
                                               static_cast<unsigned>(to));
  {
    const OnDevice guard(from);
    probe_kernel<<<1, kThreadsOfProbe, 0, stream_from.get()>>>(as<std::uint32_t>(remote), seed,
                                                               as<std::uint32_t>(wrong_there));
    check(cudaGetLastError(), "peer probe", from);
    check(cudaStreamSynchronize(stream_from.get()), "peer probe", from);
  }
  const OnDevice guard(to);
  verify_kernel<<<1, kThreadsOfProbe, 0, stream_to.get()>>>(as<std::uint32_t>(remote), seed,
                                                            as<std::uint32_t>(wrong_here));
  check(cudaGetLastError(), "peer probe", to);
  return read_word(wrong_here, to, stream_to) == 0 &&
         read_word(wrong_there, from, stream_from) == 0;
}

bool try_link(int from, int to) {
  int says_yes = 0;
  check(cudaDeviceCanAccessPeer(&says_yes, from, to), "cudaDeviceCanAccessPeer", from);
  if (says_yes == 0) return false;
  {
    const OnDevice guard(from);
    const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();  // clear the error if torch has enabled access before
    } else {
      check(status, "cudaDeviceEnablePeerAccess", from);
    }
  }
  return probe(from, to);
}

bool delivers(int from, int to) {
  static std::mutex mutex;
  static std::map<std::pair<int, int>, bool> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known.find({from, to});
  if (found != known.end()) return found->second;
  return known.emplace(std::pair(from, to), try_link(from, to)).first->second;
}

}  // namespace

bool enable_peers(int a, int b) { return a == b || (delivers(a, b) && delivers(b, a)); }

bool is_peer_visible(const void* memory) {
  static const auto get_attribute =
      reinterpret_cast<CUresult (*)(void*, CUpointer_attribute, CUdeviceptr)>(
          driver_function("cuPointerGetAttribute"));
  int from_cuda_malloc = 0;
  const CUresult status =
      get_attribute(&from_cuda_malloc, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
                    reinterpret_cast<CUdeviceptr>(memory));
  return status == CUDA_SUCCESS && from_cuda_malloc != 0;
}

}  // namespace pyringar::cuda
