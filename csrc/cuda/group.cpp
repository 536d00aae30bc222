// group: see the header.

#include "cuda/group.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "core/error.h"

namespace pyringar::cuda {

namespace {

// Then a launch waits for the end of its kernel, which waits for launches to come.
bool launches_block() {
  const char* value = std::getenv("CUDA_LAUNCH_BLOCKING");
  return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

}  // namespace

Group::Group(std::vector<int> device_of_rank, GroupOptions options)
    : devices_(std::make_shared<Devices>(std::move(device_of_rank))),
      options_(options),
      meeting_(std::make_unique<Events>(devices())),
      last_use_(std::make_unique<Events>(devices())),
      staging_(freed_later<Staging>(devices_)) {
  free_leftovers();
}

Group::~Group() {
  try {
    close();
  } catch (const Error&) {  // its owner had calls to hear of it, and close()
  }
}

void Group::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(is_closed_, true)) return;
  try {
    last_use_->wait_for();
  } catch (const Error&) {  // a device that does not answer has nothing under way
  }
  const std::string failure = new_failure();
  ring_.reset();
  staging_.reset();
  captured_rings_.clear();
  meeting_.reset();
  last_use_.reset();
  free_leftovers();
  if (failure.empty()) return;
  failure_ = failure;
  fail(ErrorKind::kTimeout, failure);
}

void Group::abort() {
  std::vector<std::shared_ptr<RingLinks>> links;
  {
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    is_aborted_ = true;
    for (const auto& one : links_) links.push_back(one.lock());
  }
  for (const auto& one : links) {
    if (one != nullptr) one->abort();
  }
}

void Group::withhold_rank(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  withheld_rank_ = rank;
}

GroupStats Group::stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

void Group::check_usable() {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable_locked();
}

bool Group::try_check_usable() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (lock) check_usable_locked();
  return lock.owns_lock();
}

bool Group::is_aborted() {
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  return is_aborted_;
}

void Group::check_usable_locked() {
  if (failure_.empty() && is_aborted()) {
    failure_ = "this communicator was aborted";
    failure_kind_ = ErrorKind::kState;
  }
  if (!failure_.empty()) fail_after(failure_kind_, failure_);
  if (is_closed_) fail_closed();
  failure_ = new_failure();
  if (!failure_.empty()) fail(ErrorKind::kTimeout, failure_);
}

// "" if there is none, or a call has raised it.
std::string Group::new_failure() {
  if (!failure_.empty() || is_aborted()) return "";
  std::string failure = ring_ == nullptr ? "" : ring_->failure(operation_);
  for (const CapturedRing& captured : captured_rings_) {
    const auto links = captured.links.lock();
    if (failure.empty() && links != nullptr) failure = links->failure("a graph's replay");
  }
  return failure;
}

// -- one call -------------------------------------------------------------------------------------

// 0: no stream is captured.
CaptureId Group::check_captures(const Collective& collective, Streams streams) const {
  const CaptureId capture = capture_of(streams[0], devices()[0]);
  for (std::size_t d = 1; d < streams.size(); ++d) {
    const CaptureId other = capture_of(streams[d], devices()[d]);
    if (other == capture) continue;
    const std::size_t outside = capture == 0 ? 0 : d;
    const std::size_t inside = capture == 0 ? d : 0;
    fail(ErrorKind::kUnsupported, collective.operation,
         ": a CUDA graph captures the stream of cuda:", devices()[inside],
         ", but not that of cuda:", devices()[outside],
         "; let the streams of all devices wait for the captured one first "
         "(torch.cuda.Stream.wait_stream), so that they are captured with it, and let it wait for "
         "them at the end");
  }
  if (capture == kBrokenCapture) {
    fail(ErrorKind::kUnsupported, collective.operation,
         ": the capture of the stream of cuda:", devices()[0],
         " in a CUDA graph was invalidated by an earlier call; end it first");
  }
  if (capture != 0 && has_host_ranks()) {
    fail(ErrorKind::kUnsupported, collective.operation,
         ": ranks in the host's memory cannot be captured");
  }
  return capture;
}

void Group::check_ring(CaptureId capture) const {
  if (has_host_ranks()) {
    fail(ErrorKind::kUnsupported, operation_,
         ": ring does not support ranks in the host's memory; use algorithm 'auto'");
  }
  if (devices_->size() == 1) return;
  if (capture != 0) {
    fail(ErrorKind::kUnsupported, operation_,
         ": a ring between GPUs cannot be captured, since a replay could meet another call that "
         "waits across devices; use algorithm 'direct'");
  }
  if (launches_block()) {
    fail(ErrorKind::kUnsupported, operation_,
         ": CUDA_LAUNCH_BLOCKING is set, and a ring between GPUs needs launches on all of them "
         "before the first one ends; unset it, or use algorithm 'direct'");
  }
}

void Group::run(const Collective& collective, Streams streams) {
  const ProfiledRange range(collective.operation);
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable_locked();
  const CaptureId capture = check_captures(collective, streams);
  if (capture == 0) free_leftovers();
  operation_ = collective.operation;
  const bool is_ring = collective.algorithm == Algorithm::kRing;
  if (is_ring) check_ring(capture);
  stats_.add(collective.algorithm, collective.bytes, {});
  if (collective.tensors.empty()) return;
  if (is_ring && capture != 0) return run_captured_ring(collective, streams, capture);
  if (is_ring) return run_ring(collective, streams);
  if (!collective.needs_staging) collective.needs_staging = staging_->is_needed(collective);
  if (*collective.needs_staging) return run_staged(collective, streams, capture);
  if (capture == 0) return run_tables(collective, streams, *meeting_);
  Events meeting(devices());
  run_tables(collective, streams, meeting);
}

void Group::run_tables(const Collective& collective, Streams streams, Events& meeting) const {
  if (collective.launches == nullptr) {
    const TensorList list{collective.tensors, collective.fold, collective.operation};
    collective.launches = std::make_shared<FusedLaunches>(list, devices().size());
  }
  const auto& launches = *static_cast<const FusedLaunches*>(collective.launches.get());
  const auto launch = [&] { launches.launch(devices(), streams, options_.max_blocks); };
  if (devices().size() == 1) return launch();
  meeting.meet(streams);
  run_and_always(launch, [&] { meeting.meet(streams); });
}

void Group::run_staged(const Collective& collective, Streams streams, CaptureId capture) {
  if (capture != 0) {
    const auto staging = freed_later<Staging>(devices_);
    Events meeting(devices());
    keep_with_graph(streams[0], devices()[0], staging);
    const Collective staged = staging->copy_in(collective, streams, nullptr);
    run_tables(staged, streams, meeting);
    return staging->copy_out(collective, staged, streams);
  }
  last_use_->make_wait(streams);
  if (has_host_ranks()) last_use_->wait_for();  // the host writes there, too
  run_and_always(
      [&] {
        const Collective staged = staging_->copy_in(collective, streams, last_use_.get());
        run_tables(staged, streams, *meeting_);
        staging_->copy_out(collective, staged, streams);
      },
      [&] { last_use_->record(streams); });
}

std::shared_ptr<RingLinks> Group::make_links() {
  std::shared_ptr<RingLinks> links;
  {
    const auto launches = lock_launches();
    links = freed_later<RingLinks>(devices_, options_.timeout, options_.max_blocks, operation_);
  }
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  std::erase_if(links_, [](const auto& one) { return one.expired(); });
  links_.push_back(links);
  if (is_aborted_) links->abort();
  return links;
}

void Group::launch_ring(RingLinks& links, const Collective& collective, Streams streams) const {
  for (const Buffers& tensor : collective.tensors) {
    links.launch(tensor, collective.fold, streams, withheld_rank_);
  }
}

void Group::run_ring(const Collective& collective, Streams streams) {
  if (ring_ == nullptr) ring_ = make_links();
  last_use_->make_wait(streams);
  const auto launch = [&] { launch_ring(*ring_, collective, streams); };
  if (devices().size() == 1) {
    return run_and_always(launch, [&] { last_use_->record(streams); });
  }
  // Of all groups of the process, in one order on all devices.
  const auto launches = lock_launches();
  static auto* last_between = new std::map<int, Event>;  // by device; guarded by the lock
  for (std::size_t d = 0; d < streams.size(); ++d) {
    const int device = devices()[d];
    last_between->try_emplace(device, device).first->second.make_wait(streams[d], device);
  }
  run_and_always(launch, [&] {
    for (std::size_t d = 0; d < streams.size(); ++d) {
      last_between->at(devices()[d]).record(streams[d]);
    }
    last_use_->record(streams);
  });
}

// Links of the capture's own, one call after the other also where its streams fork.
void Group::run_captured_ring(const Collective& collective, Streams streams, CaptureId capture) {
  std::erase_if(captured_rings_, [](const CapturedRing& ring) { return ring.links.expired(); });
  auto found = std::find_if(captured_rings_.begin(), captured_rings_.end(),
                            [&](const CapturedRing& ring) { return ring.capture == capture; });
  std::shared_ptr<RingLinks> links;
  if (found == captured_rings_.end()) {
    links = make_links();
    keep_with_graph(streams[0], devices()[0], links);
    captured_rings_.push_back({links, capture, std::make_unique<Events>(devices())});
    found = captured_rings_.end() - 1;
  } else {
    links = found->links.lock();
    found->last->make_wait(streams);
  }
  launch_ring(*links, collective, streams);
  found->last->record(streams);
}

}  // namespace pyringar::cuda
