// staging_buffers: copies of a call's tensors that all devices can access.
//
// Contract  All buffers are in host memory if any rank is, or if devices have no peer access. Else
//           each buffer is on the rank's device. Buffers grow and are reused. The caller orders the
//           calls that use them.
// Threads   one at a time.
// Tests     tests/cpp/cuda_host
#pragma once

#include <cstddef>
#include <vector>

#include "core/collective.h"
#include "cuda/devices.h"

namespace pyringar::cuda {

class StagingBuffers {
 public:
  explicit StagingBuffers(const Devices& devices);

  bool is_needed(const Collective& collective) const;
  // Copy inputs into the buffers, and return the call on them. last_use: ends of earlier calls.
  Collective copy_in(const Collective& collective, Streams streams, const Events& last_use);
  void copy_out(const Collective& collective, const Collective& staged, Streams streams) const;

 private:
  struct Buffer {
    Memory memory;
    std::size_t bytes = 0;
  };

  // Grow the buffers, and return each pointer's offset in its rank's buffer.
  std::vector<std::size_t> lay_out(const Collective& collective, const Events& last_use);
  void reserve(std::size_t rank, std::size_t bytes, const Events& last_use);
  void copy_later(void* to, const void* from, std::size_t bytes, int device, Streams streams) const;

  const Devices& devices_;
  const bool is_on_host_;
  std::vector<Buffer> buffers_;  // by rank
};

}  // namespace pyringar::cuda
