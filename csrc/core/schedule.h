// schedule: which chunk each rank sends, receives and reduces at each step of the ring.
// Units     elements for ranges; ranks, chunks and steps count from 0.
// Contract  ring_step(next, step).recv_chunk == ring_step(rank, step).send_chunk. Chunk c is added
//           in the order of ranks c+1, c+2, ..., c+k (mod k). After the reduction rank r owns
//           chunk r.
// Source    Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms".
// Tests     tests/test_schedule.py follows each contribution through the ring.
#pragma once

#include <cstddef>

// Silences nvcc warnings about templates whose arguments exist on the host or the device only.
#ifdef __CUDACC__
#define PYRINGAR_ANY_SIDE _Pragma("nv_exec_check_disable")
#define PYRINGAR_HD __host__ __device__
#define PYRINGAR_HD_INLINE __host__ __device__ __forceinline__
#else
#define PYRINGAR_ANY_SIDE
#define PYRINGAR_HD
#define PYRINGAR_HD_INLINE inline __attribute__((always_inline))
#endif

namespace pyringar {

struct RingStep {
  int send_chunk;
  int recv_chunk;
  bool reduce;  // false: the received chunk is complete, copy it
};

// Chunk sent, for k = 4:  step 0 1 2 | 3 4 5     rank 0: 3 2 1 | 0 3 2     rank 1: 0 3 2 | 1 0 3
PYRINGAR_HD constexpr RingStep ring_step(int rank, int world_size, int step) {
  const int send = (rank - 1 - step + 2 * world_size) % world_size;
  const int recv = (send + world_size - 1) % world_size;
  return {send, recv, step < world_size - 1};
}

PYRINGAR_HD constexpr int ring_num_steps(int world_size) { return 2 * (world_size - 1); }

static_assert(ring_step(1, 4, 3).send_chunk == 1, "the all-gather opens with the rank's own chunk");
static_assert(ring_step(0, 4, 2).recv_chunk == 0, "the reduction ends with the rank's own chunk");
static_assert(ring_step(0, 1, 0).send_chunk == 0, "one rank owns the one chunk");

struct Range {
  std::size_t begin;
  std::size_t end;
  PYRINGAR_HD constexpr std::size_t size() const { return end - begin; }
};

// The chunks of a buffer. Sizes differ by at most one element; longer chunks come first.
struct Chunks {
  std::size_t small;   // elements of a shorter chunk
  std::size_t longer;  // number of chunks with small + 1 elements
  PYRINGAR_HD constexpr Range operator[](int chunk) const {
    const std::size_t c = static_cast<std::size_t>(chunk);
    const std::size_t begin = c * small + (c < longer ? c : longer);
    return {begin, begin + small + (c < longer ? 1 : 0)};
  }
};

// Compute the Chunks of a buffer once and keep them: a 64-bit division is slow on a GPU.
PYRINGAR_HD constexpr Chunks chunks_of(std::size_t numel, int world_size) {
  const std::size_t k = static_cast<std::size_t>(world_size);
  return {numel / k, numel % k};
}

PYRINGAR_HD constexpr Range chunk_range(std::size_t numel, int world_size, int chunk) {
  return chunks_of(numel, world_size)[chunk];
}

static_assert(chunk_range(7, 3, 0).size() == 3 && chunk_range(7, 3, 2).end == 7, "7 = 3 + 2 + 2");
static_assert(chunk_range(2, 4, 3).size() == 0, "fewer elements than ranks: empty chunks");

// A chunk is sent in pieces of at most piece_elems. All chunks have the same number of pieces, the
// last ones possibly empty, so that all links carry the same number of messages.
PYRINGAR_HD constexpr std::size_t num_pieces(std::size_t numel, int world_size,
                                             std::size_t piece_elems) {
  const std::size_t longest = chunk_range(numel, world_size, 0).size();
  return (longest + piece_elems - 1) / piece_elems;
}

PYRINGAR_HD constexpr Range piece_range(Range chunk, std::size_t piece_elems, std::size_t piece) {
  const std::size_t size = chunk.size();
  const std::size_t begin = piece * piece_elems < size ? piece * piece_elems : size;
  const std::size_t end = begin + piece_elems < size ? begin + piece_elems : size;
  return {chunk.begin + begin, chunk.begin + end};
}

}  // namespace pyringar
