// device: what CUDA's dialect calls a thread, a block and a barrier, and the same for host threads.
//
// Tests     tests/cpp/cuda/
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)

#define PYRINGAR_DEVICE __device__
// Threads of a block, and the blocks that the registers of a multiprocessor must hold at once.
#define PYRINGAR_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define PYRINGAR_KERNEL_ARG const __grid_constant__

namespace pyringar::cuda {

__device__ inline unsigned thread_index() { return threadIdx.x; }
__device__ inline unsigned num_threads() { return blockDim.x; }
// The same where every launch has so many: the compiler then knows how far apart its loads are.
template <unsigned kCount>
__device__ constexpr unsigned num_threads() {
  return kCount;
}
__device__ inline unsigned block_index() { return blockIdx.x; }
__device__ inline unsigned num_blocks() { return gridDim.x; }
__device__ inline void block_barrier() { __syncthreads(); }
// A barrier at which all learn what thread 0 says.
__device__ inline bool block_broadcast(bool by_thread_0) {
  return __syncthreads_or(threadIdx.x == 0 && by_thread_0) != 0;
}
// What the threads of a block share, one of each type. It is not initialized.
template <typename T>
__device__ T& block_shared() {
  __shared__ T shared;
  return shared;
}
__device__ inline void poll_pause() {
#if defined(__CUDA_ARCH__)
  __nanosleep(64);
#endif
}

}  // namespace pyringar::cuda

#else

#include "cuda_emulator.h"

#endif
