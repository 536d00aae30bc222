// background: calls of a group on streams of its own, beside what the callers' streams go on with.
//
// Contract  submit() runs a call after what is on the current streams, or, of a bucket, after its
//           gradients. In a capture the own streams join it, and must be joined again
//           (Done::make_wait); calls of others are refused meanwhile. What a call reads and writes
//           must stay until wait_for() has returned, or its Done says so. Of one that fails nothing
//           runs any more.
// Threads   one at a time per Background; Done any.
// Tests     tests/cpp/cuda_host
#pragma once

#include <memory>
#include <vector>

#include "cuda/group.h"
#include "cuda/ready.h"

namespace pyringar::cuda {

// What was on streams, one for each device of a group, at one moment.
class Done : public Events {
 public:
  Done(const std::vector<int>& devices, Streams streams);
  CaptureId capture() const { return capture_; }  // 0: none

 private:
  const CaptureId capture_;
};

struct Bucket {
  const Ready* ready = nullptr;  // none: after what is on the current streams
  int index = 0;
};

class Background {
 public:
  explicit Background(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  std::shared_ptr<Done> submit(const Collective& collective, Streams current, Bucket bucket = {});
  // On the host, for all that runs.
  void wait_for() const;

 private:
  void check_captures(const Collective& collective, Streams current, Streams own) const;

  const std::shared_ptr<Group> group_;
  std::vector<Stream> own_;           // made when they are needed
  std::shared_ptr<const Done> last_;  // that is no graph's
};

}  // namespace pyringar::cuda
