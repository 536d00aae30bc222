// background: calls of a group on streams of its own, beside what the callers' streams go on with.
//
// Contract  submit() runs a call after what is on the current streams, or, of a bucket, after its
//           gradients. In a capture the own streams join it, and must be joined again
//           (DoneEvents::make_wait); calls of others are refused meanwhile. What a call reads and
//           writes must stay until wait_for() has returned, or its DoneEvents says so.
// Threads   one at a time per Background; DoneEvents any.
// Tests     tests/cpp/cuda_host
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device_group.h"

namespace pyringar::cuda {

// What was on streams, one for each device of a group, at one moment.
class DoneEvents : public Events {
 public:
  DoneEvents(const std::vector<int>& devices, Streams streams);
  CaptureId capture() const { return capture_; }  // 0: none

 private:
  const CaptureId capture_;
};

// Once a rank's last gradient of a bucket has come, an event is recorded in every stream on which
// one came, and again in the stream of one that comes once more. The stream that reduces the bucket
// waits for the events of all ranks, and so for nothing that backward does later. Any thread.
class ReadyEvents {
 public:
  // device_of_rank: kHost for ranks that need none. bucket_sizes: how many gradients each has.
  ReadyEvents(std::vector<int> device_of_rank, std::vector<int> bucket_sizes);

  int device_of(int rank) const { return device_of_rank_[static_cast<std::size_t>(rank)]; }
  // A gradient has come on this stream: is_new, the rank's first or only one for its parameter.
  void note(int bucket, int rank, bool is_new, cudaStream_t stream);
  // Streams of the ranks' devices go on after what was recorded; others are left alone.
  void make_wait(int bucket, int device, cudaStream_t stream) const;
  void start_step();

 private:
  struct StreamEvent {
    cudaStream_t stream;
    Event* event;
  };
  struct BucketRank {  // of a rank in a bucket
    int missing = 0;
    std::vector<StreamEvent> streams;
    std::deque<Event> events;  // used again in every step
  };
  BucketRank& bucket_rank(int bucket, int rank) {
    return bucket_ranks_[static_cast<std::size_t>(bucket) * device_of_rank_.size() +
                         static_cast<std::size_t>(rank)];
  }

  const std::vector<int> device_of_rank_;
  const std::vector<int> bucket_sizes_;
  mutable std::mutex mutex_;  // guards the rest
  std::vector<BucketRank> bucket_ranks_;
};

struct BucketReady {
  const ReadyEvents* ready = nullptr;  // none: after what is on the current streams
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
  std::vector<Stream> own_;                 // made when they are needed
  std::shared_ptr<const DoneEvents> last_;  // that is no graph's
};

}  // namespace pyringar::cuda
