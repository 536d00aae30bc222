// background: see the header.

#include "cuda/background.h"

#include <string>

#include "core/error.h"

namespace pyringar::cuda {

Done::Done(const std::vector<int>& devices, Streams streams)
    : Events(devices), capture_(capture_of(streams[0], devices[0])) {
  record(streams);
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
         device,
         ", and this call is not one of them; make it after the capture, or with "
         "another communicator");
  }
}

std::shared_ptr<Done> Background::submit(const Collective& collective, Streams current,
                                         Bucket bucket) {
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
  std::shared_ptr<Done> done;
  const auto note = [&] {
    done = std::make_shared<Done>(devices, own);
    if (done->capture() == 0) last_ = done;
  };
  try {
    run_and_always([&] { group_->run(collective, own); }, note);
  } catch (const Error&) {
    wait_for();  // the caller may free the tensors after the error
    throw;
  }
  return done;
}

void Background::wait_for() const {
  if (last_ == nullptr) return;
  try {
    last_->wait_for();
  } catch (const Error&) {  // a device that does not answer has nothing under way
  }
}

}  // namespace pyringar::cuda
