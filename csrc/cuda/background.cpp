// background: events of buckets and calls, and calls on separate streams.
#include "cuda/background.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/error.h"

namespace pyringar::cuda {

DoneEvents::DoneEvents(const std::vector<int>& devices, Streams streams)
    : Events(devices), capture_(capture_of(streams[0], devices[0])) {
  record(streams);
}

ReadyEvents::ReadyEvents(std::vector<int> device_of_rank, std::vector<int> bucket_sizes)
    : device_of_rank_(std::move(device_of_rank)),
      bucket_sizes_(std::move(bucket_sizes)),
      bucket_ranks_(device_of_rank_.size() * bucket_sizes_.size()) {
  start_step();
}

void ReadyEvents::start_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t i = 0; i < bucket_ranks_.size(); ++i) {
    bucket_ranks_[i].missing = bucket_sizes_[i / device_of_rank_.size()];
    bucket_ranks_[i].streams.clear();
  }
}

void ReadyEvents::note(int bucket, int rank, bool is_new, cudaStream_t stream) {
  if (device_of(rank) == kHost) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  BucketRank& own = bucket_rank(bucket, rank);
  auto found = std::find_if(own.streams.begin(), own.streams.end(),
                            [&](const StreamEvent& known) { return known.stream == stream; });
  if (found == own.streams.end()) {
    if (own.events.size() == own.streams.size()) own.events.emplace_back(device_of(rank));
    own.streams.push_back({stream, &own.events[own.streams.size()]});
    found = own.streams.end() - 1;
  }
  if (is_new && --own.missing > 0) return;
  if (own.missing > 0) return;
  if (!is_new) return found->event->record(stream);
  for (const StreamEvent& one : own.streams) one.event->record(one.stream);
}

void ReadyEvents::make_wait(int bucket, int device, cudaStream_t stream) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t rank = 0; rank < device_of_rank_.size(); ++rank) {
    if (device_of_rank_[rank] != device) continue;
    const BucketRank& own =
        bucket_ranks_[static_cast<std::size_t>(bucket) * device_of_rank_.size() + rank];
    for (const StreamEvent& one : own.streams) one.event->make_wait(stream, device);
  }
}

void Background::check_captures(const Collective& collective, Streams current, Streams own) const {
  const CaptureId capture = group_->check_captures(collective, current);
  for (std::size_t d = 0; d < own.size(); ++d) {
    const int device = group_->devices()[d];
    const CaptureId other = capture_of(own[d], device);
    if (other == 0 || other == capture) continue;
    fail(ErrorKind::kUnsupported, collective.operation,
         ": a CUDA graph captures calls in the background of this communicator, on its stream of "
         "cuda:",
         device, "; make this call after the capture, or with another communicator");
  }
}

std::shared_ptr<DoneEvents> Background::submit(const Collective& collective, Streams current,
                                               BucketReady bucket) {
  const std::string name = bucket.ready == nullptr ? "background" : join("bucket ", bucket.index);
  const ProfiledRange range(name.c_str());
  const std::vector<int>& devices = group_->devices();
  if (own_.empty()) {
    for (const int device : devices) own_.emplace_back(device);
  }
  std::vector<cudaStream_t> own;
  for (const Stream& stream : own_) own.push_back(stream.get());
  if (bucket.ready == nullptr) check_captures(collective, current, own);
  for (std::size_t d = 0; d < devices.size(); ++d) {
    if (bucket.ready != nullptr) {
      bucket.ready->make_wait(bucket.index, devices[d], own[d]);
      continue;
    }
    const Event ready(devices[d]);
    ready.record(current[d]);
    ready.make_wait(own[d], devices[d]);
  }
  std::shared_ptr<DoneEvents> done;
  const auto note = [&] {
    done = std::make_shared<DoneEvents>(devices, own);
    if (done->capture() == 0) last_ = done;
  };
  try {
    run_and_always([&] { group_->run(collective, own); }, note);
  } catch (const Error&) {
    wait_for();  // the caller may free the tensors once the error is raised
    throw;
  }
  return done;
}

void Background::wait_for() const {
  if (last_ == nullptr) return;
  try {
    last_->wait_for();
  } catch (const Error&) {  // a failed device has no running work
  }
}

}  // namespace pyringar::cuda
