// ready: from when on the gradients of a bucket are there: events in the streams that made them.
//
// Contract  A rank's gradients come on any of its device's streams. Once its last gradient of a
//           bucket has come, an event is recorded in every stream on which one came, and again in
//           the stream of one that comes once more. The stream that reduces the bucket waits for
//           the events of all ranks, and so for nothing that backward does later.
// Threads   any; a bucket may leave in one while gradients come in others.
// Tests     tests/cpp/cuda_host
#pragma once

#include <cstddef>
#include <deque>
#include <mutex>
#include <vector>

#include "cuda/runtime.h"

namespace pyringar::cuda {

class Ready {
 public:
  // device_of_rank: kHost for ranks that need none. bucket_sizes: how many gradients each has.
  Ready(std::vector<int> device_of_rank, std::vector<int> bucket_sizes);

  int device_of(int rank) const { return device_of_rank_[static_cast<std::size_t>(rank)]; }
  // A gradient has come on this stream: is_new, the rank's first or only one for its parameter.
  void note(int bucket, int rank, bool is_new, cudaStream_t stream);
  // Streams of the ranks' devices go on after what was recorded; others are left alone.
  void make_wait(int bucket, int device, cudaStream_t stream) const;
  void start_step();

 private:
  struct Stream {
    cudaStream_t stream;
    Event* event;
  };
  struct Part {  // of a rank in a bucket
    int missing = 0;
    std::vector<Stream> streams;
    std::deque<Event> events;  // used again in every step
  };
  Part& part(int bucket, int rank) {
    return parts_[static_cast<std::size_t>(bucket) * device_of_rank_.size() +
                  static_cast<std::size_t>(rank)];
  }

  const std::vector<int> device_of_rank_;
  const std::vector<int> bucket_sizes_;
  mutable std::mutex mutex_;  // guards the rest
  std::vector<Part> parts_;
};

}  // namespace pyringar::cuda
