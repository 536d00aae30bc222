// group: see the header.
//
// Floor     cuda
// Tests     tests/cpp/cuda_host/group_test.cpp, tests/test_cuda.py

#include "cuda/group.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "core/error.h"
#include "cuda/kernels.h"
#include "cuda/peers.h"
#include "cuda/table.h"

namespace pyringar::cuda {

namespace {

// Enough for every multiprocessor several times over; more blocks only wait in line.
constexpr int kMaxBlocks = 4096;
// Blocks that wait for other devices must all be on the device at once.
constexpr int kMaxWaitingBlocks = 512;
// Slots of all links together: a third of the L2 of an A100 or H200, so that pieces stay in it.
constexpr std::size_t kSlotsBytes = std::size_t{16} << 20;
constexpr std::size_t kMinSlotBytes = 4 * 1024;
constexpr std::size_t kMaxSlotBytes = 64 * 1024;
constexpr int kMaxChannels = 128;
constexpr std::size_t kFlagBytes = kFlagStride * sizeof(std::uint32_t);

// Launches that wait across devices, in the order in which all devices run them.
struct LaunchOrder {
  std::mutex mutex;
  std::map<int, Event> last;  // by device

  static LaunchOrder& get() {
    static auto* order = new LaunchOrder;  // never destroyed: CUDA may be gone by then
    return *order;
  }
  const Event& of(int device) {
    const auto found = last.find(device);
    return found != last.end() ? found->second : last.emplace(device, Event(device)).first->second;
  }
};

[[noreturn]] void refuse_in_capture(const char* operation) {
  fail(ErrorKind::kState, operation,
       ": the first call of this kind allocates memory, which a CUDA graph cannot capture; call it "
       "once with these sizes before the capture begins");
}

}  // namespace

struct Group::Device {
  int index;
  int num_multiprocessors;
  std::vector<int> ranks;
  Memory gave_up;  // one word
  Memory failure;  // in the host's memory
  Memory barrier;  // arrived[from][block], then count[block]
  BarrierPorts ports{};
};

struct Group::Ring {
  int num_channels;
  std::uint32_t num_slots;
  std::uint32_t slot_bytes;
  std::vector<Memory> slots;  // by reading rank
  std::vector<Memory> flags;  // by reading rank
  std::vector<Memory> taken;  // by writing rank
  std::vector<Memory> bases;  // by rank
  std::vector<Memory> ports;  // by device
};

Group::Group(std::vector<int> place, std::chrono::nanoseconds timeout)
    : place_(std::move(place)), timeout_(timeout) {
  for (const int device : place_) {
    if (device == kHost) {
      has_host_ranks_ = true;
    } else if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
      devices_.push_back(device);
    }
  }
  if (devices_.empty()) fail(ErrorKind::kArgument, "no rank is on a CUDA device");
  if (devices_.size() > kMaxDevices) {
    fail(ErrorKind::kUnsupported, devices_.size(), " devices, supported are ", kMaxDevices);
  }
  for (const int a : devices_) {
    for (const int b : devices_) has_peers_ = has_peers_ && enable_peers(a, b);
  }
  const std::size_t barrier_flags = devices_.size() * kMaxWaitingBlocks;
  for (const int index : devices_) {
    const OnDevice guard(index);
    Device device{index,
                  0,
                  {},
                  device_memory(index, sizeof(std::uint32_t)),
                  host_memory(sizeof(Failure)),
                  device_memory(index, (barrier_flags + kMaxWaitingBlocks) * kFlagBytes),
                  {}};
    check(
        cudaDeviceGetAttribute(&device.num_multiprocessors, cudaDevAttrMultiProcessorCount, index),
        "cudaDeviceGetAttribute", index);
    for (int rank = 0; rank < world_size(); ++rank) {
      if (place_[static_cast<std::size_t>(rank)] == index) device.ranks.push_back(rank);
    }
    per_device_.push_back(std::move(device));
  }
  if (!has_peers_) {
    // Flags that no other device could reach lie in the host's memory.
    for (Device& device : per_device_) {
      device.barrier = host_memory((barrier_flags + kMaxWaitingBlocks) * kFlagBytes);
    }
  }
  for (std::size_t d = 0; d < per_device_.size(); ++d) {
    BarrierPorts& ports = per_device_[d].ports;
    ports.device = static_cast<std::int32_t>(d);
    ports.num_devices = static_cast<std::int32_t>(per_device_.size());
    ports.max_blocks = kMaxWaitingBlocks;
    ports.arrived = as<std::uint32_t>(per_device_[d].barrier);
    ports.count = as<std::uint32_t>(per_device_[d].barrier, barrier_flags * kFlagBytes);
    for (std::size_t peer = 0; peer < per_device_.size(); ++peer) {
      ports.arrived_there[peer] = as<std::uint32_t>(per_device_[peer].barrier);
    }
  }
  staging_.resize(place_.size());
  staging_bytes_.resize(place_.size());
  staging_on_host_.resize(place_.size());
}

Group::~Group() { close(); }

void Group::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (broken_.empty()) broken_ = "the communicator is closed";
  synchronize();  // kernels under way use what is released now
  ring_.reset();
  staging_.clear();
  per_device_.clear();
}

// Without exceptions: a device that does not answer has nothing under way.
void Group::synchronize() const {
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess) return;
  for (const Device& device : per_device_) {
    if (cudaSetDevice(device.index) == cudaSuccess) cudaDeviceSynchronize();
  }
  cudaSetDevice(before);
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

void Group::check_usable_locked() {
  if (!broken_.empty()) fail(broken_kind_, broken_);
  const Failure* earliest = nullptr;
  for (const Device& device : per_device_) {
    const auto* failure = as<const Failure>(device.failure);
    if (__atomic_load_n(&failure->is_set, __ATOMIC_ACQUIRE) == 0) continue;
    // Who waits for the earliest step waits for the culprit; the others wait for that one.
    const auto turn = [](const Failure* f) { return std::pair(f->step, f->what); };
    if (earliest == nullptr || turn(failure) < turn(earliest)) earliest = failure;
  }
  if (earliest == nullptr) return;
  const std::string reason = describe_failure(*earliest);
  broken_ = join("this communicator failed before and cannot be used again: ", reason);
  broken_kind_ = ErrorKind::kTimeout;
  fail(broken_kind_, reason);
}

std::string Group::describe_failure(const Failure& failure) const {
  const double seconds = std::chrono::duration<double>(timeout_).count();
  const std::string progress = join(" (", failure.seen, " of ", failure.wanted, ")");
  if (failure.what == Awaited::kBarrier) {
    return join(operation_, ": cuda:", devices_[static_cast<std::size_t>(failure.rank)], " waited ",
                seconds, " s for cuda:", devices_[static_cast<std::size_t>(failure.peer)], " to ",
                failure.step == 0 ? "begin" : "end", progress);
  }
  const auto device_of = [&](int rank) { return place_[static_cast<std::size_t>(rank)]; };
  return join(operation_, ": rank ", failure.rank, " (cuda:", device_of(failure.rank), ") waited ",
              seconds, " s for rank ", failure.peer, " (cuda:", device_of(failure.peer), ") to ",
              failure.what == Awaited::kMessage ? "send" : "receive", " at step ", failure.step,
              " of ", ring_num_steps(world_size()), progress);
}

std::size_t Group::index_of(int device) const {
  return static_cast<std::size_t>(std::find(devices_.begin(), devices_.end(), device) -
                                  devices_.begin());
}

Patience Group::patience(std::size_t device) const {
  const Device& d = per_device_[device];
  return {static_cast<std::uint64_t>(timeout_.count()), as<std::uint32_t>(d.gave_up),
          as<Failure>(d.failure), withheld_rank_};
}

// On every device, so that no kernel is loaded while another device's already waits for it.
const std::vector<int>& Group::most_blocks(const void* kernel, int threads) {
  const auto known = most_blocks_.find(kernel);
  if (known != most_blocks_.end()) return known->second;
  std::vector<int> blocks;
  for (const Device& device : per_device_) {
    const OnDevice guard(device.index);
    int per_multiprocessor = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor", device.index);
    blocks.push_back(per_multiprocessor * device.num_multiprocessors);
  }
  return most_blocks_.emplace(kernel, std::move(blocks)).first->second;
}

// -- one call -------------------------------------------------------------------------------------

void Group::run(const Collective& collective, std::span<const cudaStream_t> streams) {
  const std::lock_guard<std::mutex> lock(mutex_);
  check_usable_locked();
  operation_ = collective.operation;
  const auto at = static_cast<std::size_t>(collective.algorithm);
  ++stats_.calls[at];
  stats_.bytes[at] += collective.bytes;
  if (collective.tensors.empty()) return;
  const bool waits = devices_.size() > 1 || collective.algorithm == Algorithm::kRing;
  const bool capturing = is_capturing(streams[0], devices_[0]);
  LaunchOrder& order = LaunchOrder::get();
  std::unique_lock<std::mutex> in_order(order.mutex, std::defer_lock);
  if (waits && !capturing) {
    in_order.lock();
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      order.of(devices_[d]).make_wait(streams[d], devices_[d]);
    }
  }
  if (collective.algorithm == Algorithm::kRing) {
    prepare_ring(capturing);
    for (const Buffers& tensor : collective.tensors) run_ring(tensor, collective.fold, streams);
  } else if (needs_staging(collective)) {
    const Collective copy = staged(collective, streams);
    run_tables(copy, streams);
    unstage(collective, copy, streams);
  } else {
    run_tables(collective, streams);
  }
  if (waits && !capturing) {
    for (std::size_t d = 0; d < devices_.size(); ++d) order.of(devices_[d]).record(streams[d]);
  }
}

// -- fused and direct -----------------------------------------------------------------------------

void Group::run_tables(const Collective& collective, std::span<const cudaStream_t> streams) {
  std::array<std::size_t, kNumDTypes> tensors_of{};
  for (const Buffers& tensor : collective.tensors) {
    ++tensors_of[static_cast<std::size_t>(tensor.dtype)];
  }
  // Of every tensor.
  const Buffers& first = collective.tensors.front();
  const auto pointers_each = static_cast<std::size_t>(first.num_sources + first.num_destinations);
  for (int i = 0; i < kNumDTypes; ++i) {
    const std::size_t count = tensors_of[static_cast<std::size_t>(i)];
    if (count == 0) continue;
    const bool is_small =
        count <= SmallTable::kMaxSegments && count * pointers_each <= SmallTable::kMaxPointers;
    if (is_small) {
      launch_tables<SmallTable>(collective, static_cast<DType>(i), streams);
    } else {
      launch_tables<LargeTable>(collective, static_cast<DType>(i), streams);
    }
  }
}

// Slices begin at multiples of this many elements, so that vectors stay aligned.
constexpr std::size_t kSliceElems = 64;

template <typename T>
void Group::launch_tables(const Collective& collective, DType dtype,
                          std::span<const cudaStream_t> streams) {
  const std::size_t item = item_bytes(dtype);
  const auto num_devices = static_cast<int>(devices_.size());
  const int num_sources = collective.tensors.front().num_sources;
  const int num_destinations = collective.tensors.front().num_destinations;
  std::size_t next = 0;
  while (next < collective.tensors.size()) {
    // The same tensors for every device, so that all have the same barriers to pass.
    std::vector<T> tables(devices_.size());
    std::vector<TableBuilder<T>> builders;
    for (T& table : tables) {
      builders.emplace_back(table, item, num_sources, num_destinations, collective.fold.divisor);
    }
    std::vector<void*> moved;
    bool is_full = false;
    for (; next < collective.tensors.size() && !is_full; ++next) {
      const Buffers& tensor = collective.tensors[next];
      if (tensor.dtype != dtype) continue;
      const std::size_t blocks = (tensor.numel + kSliceElems - 1) / kSliceElems;
      for (int d = 0; d < num_devices; ++d) {
        const Range slice = chunk_range(blocks, num_devices, d);
        const std::size_t begin = std::min(slice.begin * kSliceElems, tensor.numel);
        const std::size_t end = std::min(slice.end * kSliceElems, tensor.numel);
        const auto at_slice = [&](const void* memory) {
          return static_cast<std::byte*>(const_cast<void*>(memory)) + begin * item;
        };
        moved.clear();
        for (int i = 0; i < num_sources; ++i) moved.push_back(at_slice(tensor.sources[i]));
        if (!tensor.is_in_place()) {
          for (int i = 0; i < num_destinations; ++i) {
            moved.push_back(at_slice(tensor.destinations[i]));
          }
        }
        void* const* destinations = moved.data() + (tensor.is_in_place() ? 0 : num_sources);
        if (!builders[static_cast<std::size_t>(d)].add(moved.data(), destinations, end - begin)) {
          is_full = true;
          break;
        }
      }
      if (is_full) break;
    }
    if (tables[0].num_segments == 0) {
      if (!is_full) return;
      fail(ErrorKind::kUnsupported, collective.operation, ": ", num_sources,
           " ranks are more than one launch can address (", LargeTable::kMaxPointers, " pointers)");
    }
    int num_blocks = kMaxBlocks;
    std::uint32_t most_tiles = 0;
    for (const T& table : tables) most_tiles = std::max(most_tiles, table.num_tiles);
    const bool waits = num_devices > 1;
    const KernelKind kind = std::is_same_v<T, SmallTable>
                                ? (waits ? KernelKind::kDirectSmall : KernelKind::kFusedSmall)
                                : (waits ? KernelKind::kDirectLarge : KernelKind::kFusedLarge);
    const void* kernel = kernel_function(dtype, collective.fold.op, kind);
    if (waits) {
      const std::vector<int>& most = most_blocks(kernel, kThreads);
      num_blocks = std::min(kMaxWaitingBlocks, *std::min_element(most.begin(), most.end()));
    }
    num_blocks = std::max(1, std::min(num_blocks, static_cast<int>(most_tiles)));
    for (std::size_t d = 0; d < devices_.size(); ++d) {
      launch_table(tables[d], dtype, collective.fold.op, d, num_blocks, streams[d]);
    }
  }
}

template <typename T>
void Group::launch_table(const T& table, DType dtype, ReduceOp op, std::size_t device,
                         int num_blocks, cudaStream_t stream) {
  const bool is_small = std::is_same_v<T, SmallTable>;
  const int index = per_device_[device].index;
  const OnDevice guard(index);
  void* argument = const_cast<T*>(&table);  // copied by the launch, which takes no const
  if (devices_.size() == 1) {
    const void* kernel =
        kernel_function(dtype, op, is_small ? KernelKind::kFusedSmall : KernelKind::kFusedLarge);
    void* arguments[] = {argument};
    check(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads),
                           arguments, 0, stream),
          "launch of fused", index);
    return;
  }
  const void* kernel =
      kernel_function(dtype, op, is_small ? KernelKind::kDirectSmall : KernelKind::kDirectLarge);
  BarrierPorts ports = per_device_[device].ports;
  Patience wait = patience(device);
  if (wait.withheld >= 0) {
    const int place = place_[static_cast<std::size_t>(wait.withheld)];
    wait.withheld = static_cast<std::int32_t>(index_of(place));
  }
  void* arguments[] = {argument, &ports, &wait};
  check(cudaLaunchCooperativeKernel(kernel, dim3(static_cast<unsigned>(num_blocks)), dim3(kThreads),
                                    arguments, 0, stream),
        "launch of direct", index);
}

// -- staging --------------------------------------------------------------------------------------

bool Group::needs_staging(const Collective& collective) const {
  if (has_host_ranks_ || !has_peers_) return true;
  if (devices_.size() == 1) return false;
  return std::any_of(
      collective.pointers.begin(), collective.pointers.end(),
      [](const void* pointer) { return pointer != nullptr && !is_peer_visible(pointer); });
}

void Group::reserve_staging(std::size_t rank, std::size_t bytes, bool on_host, bool capturing) {
  if (staging_bytes_[rank] >= bytes && staging_on_host_[rank] == on_host) return;
  if (capturing) refuse_in_capture(operation_);
  if (staging_[rank] != nullptr) synchronize();  // kernels under way may use the old one
  staging_[rank] = on_host ? host_memory(bytes) : device_memory(place_[rank], bytes);
  staging_bytes_[rank] = bytes;
  staging_on_host_[rank] = on_host;
}

namespace {

// visit(index, bytes, is_input) for every pointer of a call, once, by its index in `pointers`.
template <typename Visit>
void for_each_pointer(const Collective& collective, Visit&& visit) {
  for (const Buffers& tensor : collective.tensors) {
    const std::size_t bytes = tensor.numel * item_bytes(tensor.dtype);
    const std::size_t sources = collective.index_of(tensor.sources);
    for (int i = 0; i < tensor.num_sources; ++i) {
      visit(sources + static_cast<std::size_t>(i), bytes, true);
    }
    if (tensor.is_in_place()) continue;
    const std::size_t destinations = collective.index_of(tensor.destinations);
    for (int i = 0; i < tensor.num_destinations; ++i) {
      visit(destinations + static_cast<std::size_t>(i), bytes, false);
    }
  }
}

}  // namespace

// The same call on buffers of our own, inputs copied there. A pointer that is source and
// destination is one buffer.
Collective Group::staged(const Collective& collective, std::span<const cudaStream_t> streams) {
  const bool on_host = has_host_ranks_ || !has_peers_;
  const bool capturing = is_capturing(streams[0], devices_[0]);
  if (capturing && has_host_ranks_) {
    fail(ErrorKind::kUnsupported, operation_, ": ranks in the host's memory cannot be captured");
  }
  std::vector<std::size_t> used(place_.size());
  std::vector<std::size_t> offsets(collective.pointers.size());
  for_each_pointer(collective, [&](std::size_t at, std::size_t bytes, bool) {
    std::size_t& next = used[static_cast<std::size_t>(collective.ranks[at])];
    offsets[at] = next;
    next += (bytes + 255) / 256 * 256;
  });
  for (std::size_t rank = 0; rank < used.size(); ++rank) {
    if (used[rank] > 0) reserve_staging(rank, used[rank], on_host, capturing);
  }
  Collective copy;
  copy.operation = collective.operation;
  copy.fold = collective.fold;
  copy.pointers = collective.pointers;
  copy.tensors = collective.tensors;
  for (Buffers& tensor : copy.tensors) {
    tensor.sources = copy.pointers.data() + collective.index_of(tensor.sources);
    tensor.destinations = copy.pointers.data() + collective.index_of(tensor.destinations);
  }
  for_each_pointer(collective, [&](std::size_t at, std::size_t bytes, bool is_input) {
    const auto rank = static_cast<std::size_t>(collective.ranks[at]);
    copy.pointers[at] = as<std::byte>(staging_[rank], offsets[at]);
    if (!is_input || bytes == 0) return;
    if (place_[rank] == kHost) {
      std::memcpy(copy.pointers[at], collective.pointers[at], bytes);
      return;
    }
    const OnDevice guard(place_[rank]);
    check(cudaMemcpyAsync(copy.pointers[at], collective.pointers[at], bytes, cudaMemcpyDefault,
                          streams[index_of(place_[rank])]),
          "cudaMemcpyAsync", place_[rank]);
  });
  return copy;
}

void Group::unstage(const Collective& original, const Collective& staged,
                    std::span<const cudaStream_t> streams) {
  const auto each = [&](auto&& visit) {
    for (const Buffers& tensor : original.tensors) {
      const std::size_t first = original.index_of(tensor.destinations);
      const std::size_t bytes = tensor.numel * item_bytes(tensor.dtype);
      for (int i = 0; i < tensor.num_destinations; ++i) {
        visit(first + static_cast<std::size_t>(i), bytes);
      }
    }
  };
  each([&](std::size_t at, std::size_t bytes) {
    const int place = place_[static_cast<std::size_t>(original.ranks[at])];
    if (place == kHost || bytes == 0) return;
    const OnDevice guard(place);
    check(cudaMemcpyAsync(original.pointers[at], staged.pointers[at], bytes, cudaMemcpyDefault,
                          streams[index_of(place)]),
          "cudaMemcpyAsync", place);
  });
  if (!has_host_ranks_) return;
  // The host's tensors are results now or never: nothing orders their readers after a stream.
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    const OnDevice guard(devices_[d]);
    check(cudaStreamSynchronize(streams[d]), "cudaStreamSynchronize", devices_[d]);
  }
  each([&](std::size_t at, std::size_t bytes) {
    if (place_[static_cast<std::size_t>(original.ranks[at])] != kHost) return;
    std::memcpy(original.pointers[at], staged.pointers[at], bytes);
  });
}

// -- ring -----------------------------------------------------------------------------------------

void Group::prepare_ring(bool capturing) {
  if (has_host_ranks_) {
    fail(ErrorKind::kUnsupported, operation_,
         ": the ring has no way through ranks in the host's memory; take algorithm 'auto'");
  }
  if (ring_ != nullptr) return;
  if (capturing) refuse_in_capture(operation_);
  auto ring = std::make_unique<Ring>();
  ring->num_channels = kMaxChannels;
  for (std::size_t d = 0; d < per_device_.size(); ++d) {
    const auto local = static_cast<int>(per_device_[d].ranks.size());
    if (local > kMaxLocalRanks) {
      fail(ErrorKind::kUnsupported, operation_, ": ", local, " ranks on cuda:", devices_[d],
           "; the ring takes ", kMaxLocalRanks, ", fused and direct take more");
    }
    int channels = kMaxChannels;
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      const void* kernel =
          kernel_function(static_cast<DType>(dtype), ReduceOp::kSum, KernelKind::kRing);
      channels = std::min(channels, most_blocks(kernel, kRingThreads)[d] / local);
    }
    if (channels == 0) {
      fail(ErrorKind::kUnsupported, operation_, ": cuda:", devices_[d], " is too small for ", local,
           " ranks that wait for each other");
    }
    ring->num_channels = std::min(ring->num_channels, channels);
  }
  ring->num_slots = ring_num_slots(world_size());
  const auto channels = static_cast<std::size_t>(ring->num_channels);
  const std::size_t links = place_.size() * channels * ring->num_slots;
  ring->slot_bytes = static_cast<std::uint32_t>(
      std::clamp(kSlotsBytes / links, kMinSlotBytes, kMaxSlotBytes) / 256 * 256);
  for (std::size_t rank = 0; rank < place_.size(); ++rank) {
    const int here = place_[rank];
    const int prev = place_[(rank + place_.size() - 1) % place_.size()];
    const int next = place_[(rank + 1) % place_.size()];
    const std::size_t slots_bytes = channels * ring->num_slots * ring->slot_bytes;
    const bool in_reachable = enable_peers(prev, here);
    const bool out_reachable = enable_peers(here, next);
    ring->slots.push_back(in_reachable ? device_memory(here, slots_bytes)
                                       : host_memory(slots_bytes));
    ring->flags.push_back(in_reachable ? device_memory(here, channels * kFlagBytes)
                                       : host_memory(channels * kFlagBytes));
    ring->taken.push_back(out_reachable ? device_memory(here, channels * kFlagBytes)
                                        : host_memory(channels * kFlagBytes));
    ring->bases.push_back(device_memory(here, channels * kFlagBytes));
  }
  for (const Device& device : per_device_) {
    std::vector<RingPorts> ports;
    for (const int r : device.ranks) {
      const auto rank = static_cast<std::size_t>(r);
      const std::size_t prev = (rank + place_.size() - 1) % place_.size();
      const std::size_t next = (rank + 1) % place_.size();
      ports.push_back({as<std::byte>(ring->slots[rank]), as<std::uint32_t>(ring->flags[rank]),
                       as<std::uint32_t>(ring->taken[prev]), as<std::byte>(ring->slots[next]),
                       as<std::uint32_t>(ring->flags[next]), as<std::uint32_t>(ring->taken[rank]),
                       as<std::uint32_t>(ring->bases[rank])});
    }
    Memory memory = device_memory(device.index, ports.size() * sizeof(RingPorts));
    const OnDevice guard(device.index);
    check(cudaMemcpy(memory.get(), ports.data(), ports.size() * sizeof(RingPorts),
                     cudaMemcpyHostToDevice),
          "cudaMemcpy", device.index);
    ring->ports.push_back(std::move(memory));
  }
  ring_ = std::move(ring);
}

void Group::run_ring(const Buffers& tensor, Fold fold, std::span<const cudaStream_t> streams) {
  const void* kernel = kernel_function(tensor.dtype, fold.op, KernelKind::kRing);
  const std::vector<int>& most = most_blocks(kernel, kRingThreads);
  const std::size_t capacity = ring_->slot_bytes / partial_bytes(tensor.dtype) - kSlotSpareElems;
  // Short chunks are cut finer, so that every channel has a piece.
  const std::size_t chunk = chunk_range(tensor.numel, world_size(), 0).size();
  auto channels = static_cast<std::size_t>(ring_->num_channels);
  for (std::size_t d = 0; d < per_device_.size(); ++d) {
    channels = std::min(channels, static_cast<std::size_t>(most[d]) / per_device_[d].ranks.size());
  }
  const std::size_t even = (chunk + channels - 1) / channels;
  const std::size_t piece = std::clamp<std::size_t>((even + 255) / 256 * 256, 256, capacity);
  const std::size_t pieces = num_pieces(tensor.numel, world_size(), piece);
  const auto used = static_cast<int>(std::min(channels, pieces));
  if (used == 0) return;
  for (std::size_t d = 0; d < per_device_.size(); ++d) {
    const Device& device = per_device_[d];
    RingArgs args{};
    args.ports = as<const RingPorts>(ring_->ports[d]);
    args.numel = tensor.numel;
    args.piece_elems = static_cast<std::uint32_t>(piece);
    args.num_slots = ring_->num_slots;
    args.slot_bytes = ring_->slot_bytes;
    args.world_size = world_size();
    args.num_channels = used;
    args.divisor = fold.divisor;
    args.phases = tensor.phases;
    args.patience = patience(d);
    for (std::size_t i = 0; i < device.ranks.size(); ++i) {
      const auto rank = static_cast<std::size_t>(device.ranks[i]);
      args.rank[i] = device.ranks[i];
      args.input[i] = tensor.sources[rank];
      args.output[i] = tensor.destinations[rank];
    }
    const OnDevice guard(device.index);
    const auto blocks = static_cast<unsigned>(device.ranks.size()) * static_cast<unsigned>(used);
    void* arguments[] = {&args};
    check(cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(kRingThreads), arguments, 0,
                                      streams[d]),
          "launch of ring", device.index);
  }
}

}  // namespace pyringar::cuda
