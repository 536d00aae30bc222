// ready: see the header.

#include "cuda/ready.h"

#include <algorithm>
#include <utility>

#include "core/collective.h"

namespace pyringar::cuda {

Ready::Ready(std::vector<int> device_of_rank, std::vector<int> bucket_sizes)
    : device_of_rank_(std::move(device_of_rank)),
      bucket_sizes_(std::move(bucket_sizes)),
      parts_(device_of_rank_.size() * bucket_sizes_.size()) {
  start_step();
}

void Ready::start_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t i = 0; i < parts_.size(); ++i) {
    parts_[i].missing = bucket_sizes_[i / device_of_rank_.size()];
    parts_[i].streams.clear();
  }
}

void Ready::note(int bucket, int rank, bool is_new, cudaStream_t stream) {
  if (device_of(rank) == kHost) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  Part& own = part(bucket, rank);
  auto found = std::find_if(own.streams.begin(), own.streams.end(),
                            [&](const Stream& known) { return known.stream == stream; });
  if (found == own.streams.end()) {
    if (own.events.size() == own.streams.size()) own.events.emplace_back(device_of(rank));
    own.streams.push_back({stream, &own.events[own.streams.size()]});
    found = own.streams.end() - 1;
  }
  if (is_new && --own.missing > 0) return;
  if (own.missing > 0) return;
  if (!is_new) return found->event->record(stream);
  for (const Stream& one : own.streams) one.event->record(one.stream);
}

void Ready::make_wait(int bucket, int device, cudaStream_t stream) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (std::size_t rank = 0; rank < device_of_rank_.size(); ++rank) {
    if (device_of_rank_[rank] != device) continue;
    const Part& own = parts_[static_cast<std::size_t>(bucket) * device_of_rank_.size() + rank];
    for (const Stream& one : own.streams) one.event->make_wait(stream, device);
  }
}

}  // namespace pyringar::cuda
