// peers: the probe, and what CUDA says, behind enable_peers() of cuda/devices.h.
//
// Tests     tests/cuda (on machines with two devices)

#include <cuda.h>

#include <map>
#include <mutex>
#include <utility>

#include "cuda/devices.h"
#include "cuda/folds.h"
#include "cuda/runtime.h"

namespace pyringar::cuda {

namespace {

bool probe(int from, int to) {
  constexpr std::size_t kBytes = 16 * 1024;
  const BesideCaptures beside;
  // Not the default streams, which would synchronize with captured streams.
  const Stream stream(from);
  const Stream other(to);
  const Memory here = device_memory(from, 2 * kBytes);
  const Memory there = device_memory(to, 2 * kBytes);
  const Probe sent = probe_of(from, kBytes);
  const auto finds = [&](int device, const Stream& by, std::byte* at, std::byte* own) {
    return read_probe(device, by.get(), at, own, sent.size()) == sent;
  };
  write_probe(from, stream.get(), sent, as<std::byte>(here));
  // `from` writes to the other device, which finds it there; then `from` reads it there.
  return finds(from, stream, as<std::byte>(here), as<std::byte>(there)) &&
         finds(to, other, as<std::byte>(there), as<std::byte>(there, kBytes)) &&
         finds(from, stream, as<std::byte>(there), as<std::byte>(here, kBytes));
}

bool try_link(int from, int to) {
  int says_yes = 0;
  check(cudaDeviceCanAccessPeer(&says_yes, from, to), "cudaDeviceCanAccessPeer", from);
  if (says_yes == 0) return false;
  {
    const OnDevice guard(from);
    const cudaError_t status = cudaDeviceEnablePeerAccess(to, 0);
    if (status == cudaErrorPeerAccessAlreadyEnabled) {
      cudaGetLastError();  // torch has been here
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
