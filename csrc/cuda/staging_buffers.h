// staging: a call's tensors in buffers that all devices reach, where they do not reach the tensors.
//
// Contract  buffers lie in the host's memory if a rank does or if devices do not reach each other,
//           else on the rank's device. They grow and are used again by later calls, which must
//           follow each other, which the caller ensures.
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
  // The same call on buffers, inputs copied there. A pointer that is source and destination is one
  // buffer. last_use: of the buffers, by calls before.
  Collective copy_in(const Collective& collective, Streams streams, const Events& last_use);
  void copy_out(const Collective& collective, const Collective& staged, Streams streams) const;

 private:
  struct Buffer {
    Memory memory;
    std::size_t bytes = 0;
  };

  // Where each pointer's copy begins in its rank's buffer; the buffers are large enough afterwards.
  std::vector<std::size_t> lay_out(const Collective& collective, const Events& last_use);
  void reserve(std::size_t rank, std::size_t bytes, const Events& last_use);
  void copy_later(void* to, const void* from, std::size_t bytes, int device, Streams streams) const;

  const Devices& devices_;
  const bool is_on_host_;
  std::vector<Buffer> buffers_;  // by rank
};

}  // namespace pyringar::cuda
