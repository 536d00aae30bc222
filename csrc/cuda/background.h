// background: asynchronous calls, on separate streams beside the callers' streams.
//
// Contract  submit() runs a call after the work on the current streams, or after a bucket's
//           gradients. The caller keeps the tensors until wait_for() returns or DoneEvents is done.
//           If the current streams are captured, the separate streams join the capture, until
//           DoneEvents::make_wait() joins them back. Meanwhile calls outside of it are refused.
// Threads   Background: one at a time. DoneEvents: any.
// Tests     tests/cpp/cuda_host
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device_group.h"

namespace pyringar::cuda {

// Events recorded at the end of one call, one per device.
class DoneEvents : public Events {
 public:
  DoneEvents(const std::vector<int>& devices, Streams streams);
  CaptureId capture() const { return capture_; }  // 0: recorded outside of a capture

 private:
  const CaptureId capture_;
};

// Events that mark when a bucket's gradients are ready. When a rank has all gradients of a bucket,
// each stream that produced one records an event. A gradient accumulated again records its stream
// again. The bucket's call does not wait for later work of backward. Any thread.
class ReadyEvents {
 public:
  // device_of_rank: kHost for ranks without events. bucket_sizes: gradients per bucket.
  ReadyEvents(std::vector<int> device_of_rank, std::vector<int> bucket_sizes);

  int device_of(int rank) const { return device_of_rank_[static_cast<std::size_t>(rank)]; }
  // Record that a gradient was accumulated on this stream. is_new: for the first time in this step.
  void note(int bucket, int rank, bool is_new, cudaStream_t stream);
  // Make a stream of the device wait for the bucket's gradients on that device.
  void make_wait(int bucket, int device, cudaStream_t stream) const;
  void start_step();

 private:
  struct StreamEvent {
    cudaStream_t stream;
    Event* event;
  };
  struct BucketRank {  // one rank's gradients of one bucket
    int missing = 0;
    std::vector<StreamEvent> streams;
    std::deque<Event> events;  // reused in every step
  };
  BucketRank& bucket_rank(int bucket, int rank) {
    return bucket_ranks_[static_cast<std::size_t>(bucket) * device_of_rank_.size() +
                         static_cast<std::size_t>(rank)];
  }

  const std::vector<int> device_of_rank_;
  const std::vector<int> bucket_sizes_;
  mutable std::mutex mutex_;  // guards bucket_ranks_
  std::vector<BucketRank> bucket_ranks_;
};

struct BucketReady {
  const ReadyEvents* ready = nullptr;  // null: the call waits for the current streams
  int index = 0;
};

class Background {
 public:
  explicit Background(std::shared_ptr<DeviceGroup> group) : group_(std::move(group)) {}

  std::shared_ptr<DoneEvents> submit(const Collective& collective, Streams current,
                                     BucketReady bucket = {});
  void wait_for() const;

 private:
  void check_captures(const Collective& collective, Streams current, Streams own) const;

  const std::shared_ptr<DeviceGroup> group_;
  std::vector<Stream> own_;  // separate stream per device, made by the first submit()
  std::shared_ptr<const DoneEvents> last_;  // end of the last call outside of captures
};

}  // namespace pyringar::cuda
