// device_watch: polls the words of all GPUs and releases waiting streams.
#include "cuda_process/device_watch.h"

#include <string>
#include <system_error>

#include "core/error.h"
#include "core/ring_program.h"

namespace pyringar {

namespace {

constexpr std::uint64_t kIsReleased = std::uint64_t{1} << 32;

std::uint32_t value_of(const DeviceLine::Word& word) {
  return word.value.load(std::memory_order_acquire);
}

// Raise a word to at least `wanted`. Other ranks may raise it at the same time.
void raise(DeviceLine::Word& word, std::uint32_t wanted) {
  std::uint32_t now = value_of(word);
  while (!reached(now, wanted) && !word.value.compare_exchange_weak(now, wanted)) {
  }
}

}  // namespace

bool is_void(const Segment& segment, std::uint32_t last) {
  for (int rank = 0; rank < segment.world_size(); ++rank) {
    const std::uint64_t released = segment.device(rank).released.load(std::memory_order_acquire);
    if (released != 0 && !reached(static_cast<std::uint32_t>(released), last)) return true;
  }
  return false;
}

DeviceWatch::DeviceWatch(const Segment& segment, int rank, const PeerWatch& host)
    : segment_(segment),
      rank_(rank),
      host_(host),
      last_(value_of(segment.device(rank).finished)),
      announced_(last_.load()),
      reduced_(last_.load()),
      stillness_(segment.world_size(), host.timeout()) {}

DeviceWatch::~DeviceWatch() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void DeviceWatch::begin(std::uint32_t last) {
  // Raise expected values to at least `finished`: after 2^31 messages an old value compares wrong.
  const std::uint32_t done = value_of(segment_.device(rank_).finished);
  for (std::atomic<std::uint32_t>* expected : {&announced_, &reduced_}) {
    if (reached(done, expected->load())) expected->store(done);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (segment_.world_size() > 1 && !thread_.joinable()) {
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      fail(ErrorKind::kState,
           "cannot start a thread that watches the other ranks' GPUs: ", error.what());
    }
  }
  last_.store(last, std::memory_order_release);
  if (is_sleeping_) changed_.notify_all();
}

bool DeviceWatch::is_idle() const {
  return reached(value_of(segment_.device(rank_).finished), last());
}

std::uint64_t DeviceWatch::progress_of(int rank) const {
  const DeviceLine& line = segment_.device(rank);
  return std::uint64_t{value_of(line.announced)} + value_of(line.reduced) + value_of(line.finished);
}

std::uint64_t DeviceWatch::progress() const {
  std::uint64_t all = 0;
  for (int rank = 0; rank < segment_.world_size(); ++rank) all += progress_of(rank);
  return all;
}

void DeviceWatch::abort() {
  const std::lock_guard<std::mutex> lock(mutex_);
  releases_all_ = true;
  poll();
}

void DeviceWatch::run() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!is_ending_) {
    if (is_idle()) {
      stillness_.forget();
      is_sleeping_ = true;
      changed_.wait(lock, [this] { return is_ending_ || !is_idle(); });
      is_sleeping_ = false;
    } else {
      changed_.wait_for(lock, stillness_.nap());
      poll();
    }
  }
}

void DeviceWatch::poll() {
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    if (rank == rank_ || !is_behind(rank)) continue;
    if (releases_all_) {
      release(rank);
    } else if (const char* how = host_.how_gone(rank); how != nullptr && is_behind(rank)) {
      // is_behind() is checked again: the rank may have written messages just before it exited.
      give_up(rank, ErrorKind::kPeerLost, join(", which ", how));
    }
  }
  if (releases_all_) return;
  stillness_.set_timeout(host_.timeout());
  stillness_.look(rank_, [this](int rank) { return progress_of(rank); });
  const int culprit = most_behind();
  // If this GPU is not ahead of the culprit, this GPU may be the late one: its peers detect that.
  if (culprit < 0 || lead(rank_, culprit) <= 0) return stillness_.forget();
  if (!stillness_.is_late(culprit)) return;
  releases_all_ = true;
  const double seconds = std::chrono::duration<double>(stillness_.timeout()).count();
  give_up(culprit, ErrorKind::kTimeout, join(" for ", seconds, " s"));
}

bool DeviceWatch::is_behind(int rank) const {
  const DeviceLine& line = segment_.device(rank);
  const std::uint32_t done = value_of(segment_.device(rank_).finished);
  const auto is_awaited = [&](const DeviceLine::Word& word, std::uint32_t expected) {
    return !reached(done, expected) && !reached(value_of(word), expected);
  };
  return is_awaited(line.announced, announced_.load(std::memory_order_acquire)) ||
         is_awaited(line.reduced, reduced_.load(std::memory_order_acquire));
}

// Return the rank that is furthest behind, or -1 if this rank's streams wait for no rank.
int DeviceWatch::most_behind() const {
  int last = -1;
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    if (rank == rank_ || !is_behind(rank)) continue;
    const std::int32_t ahead = last < 0 ? -1 : lead(rank, last);
    if (ahead < 0 || (ahead == 0 && stillness_.still(rank) > stillness_.still(last))) last = rank;
  }
  return last;
}

void DeviceWatch::give_up(int culprit, ErrorKind kind, const std::string& why) {
  tell_failure(
      segment_, kind,
      join("the GPU of ", host_.name_of(rank_), " waited for that of ", host_.name_of(culprit), why,
           "; ", host_.last_call_of(culprit), ". Results of unfinished calls are undefined"));
  release(culprit);
}

void DeviceWatch::release(int rank) const {
  DeviceLine& line = segment_.device(rank);
  std::uint64_t none = 0;
  line.released.compare_exchange_strong(none, kIsReleased | value_of(line.finished));
  raise(line.announced, announced_.load(std::memory_order_acquire));
  raise(line.reduced, reduced_.load(std::memory_order_acquire));
}

}  // namespace pyringar
