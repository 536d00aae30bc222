// device: what CUDA's dialect calls a thread, a block and a barrier, and the same for host threads.
//
// Floor     cuda: device code. Where nvcc does not compile it, cuda_emulator.h of the tests brings
//           the names: kernels then run on CPU threads, one per CUDA thread.
// Tests     tests/cpp/cuda/
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)

#define PYRINGAR_DEVICE __device__
#define PYRINGAR_KERNEL(threads) __global__ void __launch_bounds__(threads, 1)
#define PYRINGAR_KERNEL_ARG const __grid_constant__

namespace pyringar::cuda {

__device__ inline unsigned thread_index() { return threadIdx.x; }
__device__ inline unsigned num_threads() { return blockDim.x; }
__device__ inline unsigned block_index() { return blockIdx.x; }
__device__ inline unsigned num_blocks() { return gridDim.x; }
__device__ inline void block_barrier() { __syncthreads(); }
// Two words that the threads of a block share.
__device__ inline std::uint32_t* block_words() {
  __shared__ std::uint32_t words[2];
  return words;
}
__device__ inline void spin_pause() {
#if defined(__CUDA_ARCH__)
  __nanosleep(64);
#endif
}

}  // namespace pyringar::cuda

#else

#include "cuda_emulator.h"

#endif
