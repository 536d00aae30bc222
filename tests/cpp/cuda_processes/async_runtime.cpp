// async_runtime: see the header.

#include "async_runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "check.h"
#include "cuda/table.h"
#include "cuda_emulator.h"
#include "launched.h"

namespace pyringar::stress {

namespace {

struct EventState {
  int owner;
  bool is_interprocess;
  std::uint64_t recorded = 0;          // by the host
  std::uint64_t done = 0;              // by the device
  std::map<int, std::uint64_t> asked;  // by processes that opened it: the last record waited for
};

struct EventHandle {
  std::shared_ptr<EventState> state;
  int process;
};

struct Entry {
  std::function<void()> run;  // or none: a record or a wait
  std::shared_ptr<EventState> event;
  std::uint64_t record = 0;
  bool is_wait = false;
};

struct StreamState {
  int process;
  std::uint64_t priority = 0;
  std::deque<Entry> entries;
};

struct Allocation {
  std::byte* memory;
  std::size_t bytes;
  int owner;
  int fd;
  int num_mapped = 0;
};

struct Devices {
  std::mutex mutex;
  Random random{1};
  int one_in = 0;
  int steps_left = 0;
  std::vector<std::unique_ptr<StreamState>> streams;
  std::map<std::pair<int, int>, StreamState*> null_streams;  // by process and device
  std::map<std::uint64_t, Allocation> allocations;
  std::map<void*, std::uint64_t> mapped;  // opened by others
  std::map<std::uint64_t, std::shared_ptr<EventState>> shown;
  std::map<int, Opening> openings;
  std::uint64_t next_id = 1;
  long num_events = 0;
  cudaStream_t captured = nullptr;
};

Devices& devices() {
  static auto* all = new Devices;
  return *all;
}

thread_local int this_rank = -1;
thread_local int current_device = 0;

// With the lock held, all below.

bool can_run(const StreamState& stream) {
  if (stream.entries.empty()) return false;
  const Entry& next = stream.entries.front();
  return !next.is_wait || next.event->done >= next.record;
}

// One entry of the stream that is first for now; false: there is nothing that could run.
bool step(Devices& d) {
  if (d.steps_left-- <= 0) {
    d.steps_left = static_cast<int>(d.random.below(60));
    for (auto& stream : d.streams) stream->priority = d.random.bits();
  }
  StreamState* first = nullptr;
  for (auto& stream : d.streams) {
    if (can_run(*stream) && (first == nullptr || stream->priority > first->priority)) {
      first = stream.get();
    }
  }
  if (first == nullptr) return false;
  const Entry entry = std::move(first->entries.front());
  first->entries.pop_front();
  if (entry.run) {
    entry.run();
  } else if (!entry.is_wait) {
    entry.event->done = std::max(entry.event->done, entry.record);
  }
  return true;
}

template <typename IsDone>
void run_until(Devices& d, IsDone&& is_done) {
  while (!is_done()) CHECK(step(d), "streams wait for each other for ever");
}

bool all_are_empty(const Devices& d) {
  for (const auto& stream : d.streams) {
    if (!stream->entries.empty()) return false;
  }
  return true;
}

StreamState* state_of(Devices& d, cudaStream_t stream) {
  if (stream != nullptr) return reinterpret_cast<StreamState*>(stream);
  StreamState*& found = d.null_streams[{this_rank, current_device}];
  if (found == nullptr) {
    d.streams.push_back(std::make_unique<StreamState>(StreamState{this_rank, 0, {}}));
    found = d.streams.back().get();
  }
  return found;
}

cudaError_t enqueue(cudaStream_t stream, Entry entry) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  state_of(d, stream)->entries.push_back(std::move(entry));
  if (d.one_in > 0 && d.random.one_in(d.one_in)) step(d);
  return cudaSuccess;
}

using cuda::KernelKind;

std::byte* map(int fd, std::size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(memory != MAP_FAILED, "no memory");
  return static_cast<std::byte*>(memory);
}

}  // namespace

void become_process(int process) { this_rank = process; }

void start_devices(std::uint64_t seed, int one_in) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  d.random = Random(seed);
  d.one_in = one_in;
  d.openings.clear();
}

void run_streams_to_end() {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  run_until(d, [&] { return all_are_empty(d); });
}

void capture(cudaStream_t stream) {
  const std::lock_guard<std::mutex> lock(devices().mutex);
  devices().captured = stream;
}

long num_allocations() {
  const std::lock_guard<std::mutex> lock(devices().mutex);
  return static_cast<long>(devices().allocations.size() + devices().mapped.size());
}

long num_events() {
  const std::lock_guard<std::mutex> lock(devices().mutex);
  return devices().num_events;
}

void set_opening(int process, Opening opening) {
  const std::lock_guard<std::mutex> lock(devices().mutex);
  devices().openings[process] = opening;
}

}  // namespace pyringar::stress

using namespace pyringar;
using namespace pyringar::stress;

extern "C" {

cudaError_t cudaGetDevice(int* device) { return *device = current_device, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return current_device = device, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 8, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t) { return "refused"; }
const char* cudaGetErrorName(cudaError_t) { return "fake"; }

// -- memory ---------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  const int fd = memfd_create("device", MFD_CLOEXEC);
  CHECK(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0, "no memory");
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  std::byte* mapped = map(fd, bytes);
  d.allocations[d.next_id++] = {mapped, bytes, this_rank, fd};
  return *memory = mapped, cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  for (auto found = d.allocations.begin(); found != d.allocations.end(); ++found) {
    Allocation& allocation = found->second;
    if (allocation.memory != memory) continue;
    CHECK(allocation.num_mapped == 0, "memory of rank ", allocation.owner, " freed while ",
          allocation.num_mapped, " others have it open");
    munmap(memory, allocation.bytes);
    ::close(allocation.fd);
    d.allocations.erase(found);
    return cudaSuccess;
  }
  CHECK(false, "freed what was not allocated");
  return cudaErrorInvalidValue;
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return cudaMalloc(memory, bytes);
}
cudaError_t cudaFreeHost(void* memory) { return cudaFree(memory); }
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  return std::memset(memory, value, bytes), cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return enqueue(stream, {[=] { std::memcpy(to, from, bytes); }, nullptr});
}
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  for (const auto& [id, allocation] : d.allocations) {
    if (allocation.memory != memory) continue;
    std::memcpy(handle, &id, sizeof id);
    return cudaSuccess;
  }
  return cudaErrorInvalidValue;
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  std::uint64_t id = 0;
  std::memcpy(&id, &handle, sizeof id);
  const auto found = d.allocations.find(id);
  if (found == d.allocations.end() || found->second.owner == this_rank ||
      d.openings[this_rank] == Opening::kIsRefused) {
    return cudaErrorInvalidValue;
  }
  found->second.num_mapped += 1;
  if (d.openings[this_rank] == Opening::kGivesOtherMemory) {
    const int fd = memfd_create("other", MFD_CLOEXEC);
    CHECK(ftruncate(fd, static_cast<off_t>(found->second.bytes)) == 0, "no memory");
    *memory = map(fd, found->second.bytes);
    ::close(fd);
  } else {
    *memory = map(found->second.fd, found->second.bytes);
  }
  d.mapped[*memory] = id;
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  const auto found = d.mapped.find(memory);
  CHECK(found != d.mapped.end(), "closed what was not opened");
  Allocation& allocation = d.allocations.at(found->second);
  allocation.num_mapped -= 1;
  munmap(memory, allocation.bytes);
  d.mapped.erase(found);
  return cudaSuccess;
}

// -- streams --------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  d.streams.push_back(std::make_unique<StreamState>(StreamState{this_rank, d.random.bits(), {}}));
  return *stream = reinterpret_cast<cudaStream_t>(d.streams.back().get()), cudaSuccess;
}
// What is on it still runs, as CUDA says.
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  return *lowest = *highest = 0, cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  StreamState* state = state_of(d, stream);
  run_until(d, [&] { return state->entries.empty(); });
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  const std::lock_guard<std::mutex> lock(devices().mutex);
  const bool is_captured = stream != nullptr && stream == devices().captured;
  *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments,
                             std::size_t, cudaStream_t stream) {
  const std::optional<KernelKind> kind = kind_of(kernel);
  if (kind != KernelKind::kFusedSmall && kind != KernelKind::kFusedLarge) {
    return cudaErrorInvalidDeviceFunction;
  }
  const auto call = kind == KernelKind::kFusedSmall ? bound<cuda::SmallTable>(kernel, arguments)
                                                    : bound<cuda::LargeTable>(kernel, arguments);
  return enqueue(stream, {[=] { emulator::run_in_turn({blocks.x, threads.x, call}); }, nullptr});
}

// -- events ---------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  d.num_events += 1;
  const bool is_interprocess = (flags & cudaEventInterprocess) != 0;
  CHECK(!is_interprocess || (flags & cudaEventDisableTiming) != 0, "CUDA refuses this");
  auto* made = new EventHandle{
      std::make_shared<EventState>(EventState{this_rank, is_interprocess, 0, 0, {}}), this_rank};
  return *event = reinterpret_cast<cudaEvent_t>(made), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  d.num_events -= 1;
  auto* handle = reinterpret_cast<EventHandle*>(event);
  EventState& state = *handle->state;
  if (state.is_interprocess && handle->process != state.owner) {
    state.asked.erase(handle->process);
  } else {
    CHECK(state.asked.empty(), "an event of rank ", state.owner, " destroyed while ",
          state.asked.size(), " others have it open");
  }
  delete handle;
  return cudaSuccess;
}
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  const auto& state = reinterpret_cast<EventHandle*>(event)->state;
  if (!state->is_interprocess) return cudaErrorInvalidResourceHandle;
  const std::uint64_t id = d.next_id++;
  d.shown[id] = state;
  std::memcpy(handle, &id, sizeof id);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  std::uint64_t id = 0;
  std::memcpy(&id, &handle, sizeof id);
  const auto found = d.shown.find(id);
  if (found == d.shown.end() || found->second->owner == this_rank) return cudaErrorInvalidValue;
  d.num_events += 1;
  found->second->asked[this_rank] = found->second->recorded;
  auto* opened = new EventHandle{found->second, this_rank};
  return *event = reinterpret_cast<cudaEvent_t>(opened), cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto state = reinterpret_cast<EventHandle*>(event)->state;
  std::uint64_t record = 0;
  {
    const std::lock_guard<std::mutex> lock(devices().mutex);
    for (const auto& [process, asked] : state->asked) {
      CHECK(asked == state->recorded, "rank ", state->owner, " records an event for the ",
            state->recorded + 1, ". time, and rank ", process, " has not asked for the last one");
    }
    record = ++state->recorded;
  }
  return enqueue(stream, {nullptr, state, record, false});
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  const auto* handle = reinterpret_cast<EventHandle*>(event);
  std::uint64_t record = 0;
  {
    const std::lock_guard<std::mutex> lock(devices().mutex);
    record = handle->state->recorded;
    const auto asked = handle->state->asked.find(handle->process);
    if (asked != handle->state->asked.end()) asked->second = record;
  }
  return enqueue(stream, {nullptr, handle->state, record, true});
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Devices& d = devices();
  const std::lock_guard<std::mutex> lock(d.mutex);
  for (int i = 0; i < 20; ++i) step(d);
  const EventState& state = *reinterpret_cast<EventHandle*>(event)->state;
  return state.done == state.recorded ? cudaSuccess : cudaErrorNotReady;
}

}  // extern "C"
