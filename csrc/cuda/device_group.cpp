// device_group: runs calls with the fused, direct or ring algorithm.
#include "cuda/device_group.h"

#include <cstdlib>
#include <string_view>
#include <utility>

#include "core/error.h"

namespace pyringar::cuda {

namespace {

// True if each launch waits for its kernel: a ring's first kernel would wait for later launches.
bool launches_block() {
  const char* value = std::getenv("CUDA_LAUNCH_BLOCKING");
  return value != nullptr && *value != '\0' && std::string_view(value) != "0";
}

}  // namespace

DeviceGroup::DeviceGroup(std::vector<int> device_of_rank, std::chrono::nanoseconds timeout)
    : devices_(std::move(device_of_rank)),
      timeout_(timeout),
      meeting_(std::make_unique<Events>(devices())),
      last_use_(std::make_unique<Events>(devices())),
      staging_(std::make_unique<StagingBuffers>(devices_)) {}

DeviceGroup::~DeviceGroup() {
  try {
    close();
  } catch (const Error&) {  // destructors cannot throw; a call of close() raises it
  }
}

void DeviceGroup::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::exchange(is_closed_, true)) return;
  try {
    last_use_->wait_for();
  } catch (const Error&) {  // a failed device has no running work
  }
  const std::string failure = new_failure();
  {
    const auto launches = lock_launches();
    std::unique_lock<std::mutex> abort_lock(abort_mutex_);
    std::unique_ptr<DeviceRing> ring = std::move(ring_);
    abort_lock.unlock();  // freeing memory can take long
    ring.reset();
    staging_.reset();
  }
  meeting_.reset();
  last_use_.reset();
  if (failure.empty()) return;
  failure_ = failure;
  fail(ErrorKind::kTimeout, failure);
}

void DeviceGroup::abort() {
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  is_aborted_ = true;
  if (ring_ != nullptr) ring_->abort();
}

void DeviceGroup::withhold_rank(int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  withheld_rank_ = rank;
}

GroupStats DeviceGroup::stats() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

void DeviceGroup::check_usable() {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable_locked();
}

bool DeviceGroup::try_check_usable() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (lock) check_usable_locked();
  return lock.owns_lock();
}

bool DeviceGroup::is_aborted() {
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  return is_aborted_;
}

void DeviceGroup::check_usable_locked() {
  if (failure_.empty() && is_aborted()) {
    failure_ = "this communicator was aborted";
    failure_kind_ = ErrorKind::kState;
  }
  if (!failure_.empty()) fail_after(failure_kind_, failure_);
  if (is_closed_) fail_closed();
  failure_ = new_failure();
  if (!failure_.empty()) fail(ErrorKind::kTimeout, failure_);
}

std::string DeviceGroup::new_failure() {
  if (!failure_.empty() || is_aborted() || ring_ == nullptr) return "";
  return ring_->failure(operation_);
}

CaptureId DeviceGroup::check_captures(const Collective& collective, Streams streams) const {
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
  if (capture != 0) check_capturable(collective);
  return capture;
}

void DeviceGroup::check_capturable(const Collective& collective) const {
  if (collective.algorithm == Algorithm::kRing) {
    fail(ErrorKind::kUnsupported, collective.operation,
         ": a ring cannot be captured in a CUDA graph; use algorithm 'direct'");
  }
  if (has_host_ranks()) {
    fail(ErrorKind::kUnsupported, collective.operation,
         ": ranks in the host's memory cannot be captured in a CUDA graph; call it outside of the "
         "capture");
  }
  if (staging_->is_needed(collective)) {
    fail(
        ErrorKind::kUnsupported, collective.operation,
        ": GPUs that do not reach each other's tensors cannot be captured in a CUDA graph; call it "
        "outside of the capture");
  }
}

void DeviceGroup::check_ring() const {
  if (has_host_ranks()) {
    fail(ErrorKind::kUnsupported, operation_,
         ": ring does not support ranks in the host's memory; use algorithm 'auto'");
  }
  if (devices_.size() == 1 || !launches_block()) return;
  fail(ErrorKind::kUnsupported, operation_,
       ": CUDA_LAUNCH_BLOCKING is set, and a ring between GPUs needs launches on all of them "
       "before the first one ends; unset it, or use algorithm 'direct'");
}

void DeviceGroup::run(const Collective& collective, Streams streams) {
  const ProfiledRange range(collective.operation);
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable_locked();
  const CaptureId capture = check_captures(collective, streams);
  operation_ = collective.operation;
  const bool is_ring = collective.algorithm == Algorithm::kRing;
  if (is_ring) check_ring();
  stats_.add(collective.algorithm, collective.bytes, {});
  if (collective.tensors.empty()) return;
  if (is_ring) return run_ring(collective, streams);
  if (!collective.needs_staging) collective.needs_staging = staging_->is_needed(collective);
  if (*collective.needs_staging) return run_staged(collective, streams);
  if (capture == 0) return run_tables(collective, streams, *meeting_);
  Events meeting(devices());
  run_tables(collective, streams, meeting);
}

void DeviceGroup::run_tables(const Collective& collective, Streams streams, Events& meeting) const {
  if (collective.launches == nullptr) {
    const TensorList list{collective.tensors, collective.fold, collective.operation};
    collective.launches = std::make_shared<FusedLaunches>(list, devices().size());
  }
  const auto& launches = *static_cast<const FusedLaunches*>(collective.launches.get());
  const auto launch = [&] { launches.launch(devices(), streams); };
  if (devices().size() == 1) return launch();
  meeting.meet(streams);
  run_and_always(launch, [&] { meeting.meet(streams); });
}

void DeviceGroup::run_staged(const Collective& collective, Streams streams) {
  last_use_->make_wait(streams);
  if (has_host_ranks()) last_use_->wait_for();  // the host writes to the staging buffers too
  run_and_always(
      [&] {
        const Collective staged = staging_->copy_in(collective, streams, *last_use_);
        run_tables(staged, streams, *meeting_);
        staging_->copy_out(collective, staged, streams);
      },
      [&] { last_use_->record(streams); });
}

void DeviceGroup::make_links() {
  const auto launches = lock_launches();
  auto links = std::make_unique<DeviceRing>(devices_, timeout_, operation_);
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  ring_ = std::move(links);
  if (is_aborted_) ring_->abort();
}

void DeviceGroup::run_ring(const Collective& collective, Streams streams) {
  if (ring_ == nullptr) make_links();
  last_use_->make_wait(streams);
  const auto launch = [&] {
    for (const Buffers& tensor : collective.tensors) {
      ring_->launch(tensor, collective.fold, streams, withheld_rank_);
    }
  };
  if (devices_.size() == 1) {
    return run_and_always(launch, [&] { last_use_->record(streams); });
  }
  // All groups of the process enqueue their rings in one order on all devices, to avoid deadlocks.
  const auto launches = lock_launches();
  static auto* last_between = new std::map<int, Event>;  // by device; guarded by lock_launches()
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

}  // namespace pyringar::cuda
