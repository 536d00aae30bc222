// device: threads, blocks and barriers, in CUDA or as host threads in tests.
//
// Tests     tests/cpp/cuda/
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)

#define PYRINGAR_DEVICE __device__
// threads: per block. blocks: how many must fit into the registers of one multiprocessor.
#define PYRINGAR_KERNEL(threads, blocks) __global__ void __launch_bounds__(threads, blocks)
#define PYRINGAR_KERNEL_ARG const __grid_constant__

namespace pyringar::cuda {

__device__ inline unsigned thread_index() { return threadIdx.x; }
__device__ inline unsigned num_threads() { return blockDim.x; }
// Block size as a constant: with known strides the compiler can batch loads.
template <unsigned kCount>
__device__ constexpr unsigned num_threads() {
  return kCount;
}
__device__ inline unsigned block_index() { return blockIdx.x; }
__device__ inline unsigned num_blocks() { return gridDim.x; }
__device__ inline void block_barrier() { __syncthreads(); }
// Barrier that returns thread 0's argument on all threads of the block.
__device__ inline bool block_broadcast(bool by_thread_0) {
  return __syncthreads_or(threadIdx.x == 0 && by_thread_0) != 0;
}
// Uninitialized shared memory of the block: one object per type.
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
