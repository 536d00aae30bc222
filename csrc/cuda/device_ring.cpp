// device_ring: allocates slots and flags, and launches the ring kernel.
#include "cuda/device_ring.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/schedule.h"
#include "cuda/kernels.h"
#include "cuda/peers.h"

namespace pyringar::cuda {

namespace {

// Bytes of all slots together. Signalling costs the same for any slot size, so large slots gain
// more than slots that fit into L2 (docs/cuda-kernels.md).
constexpr std::size_t kSlotsBytes = std::size_t{128} << 20;
constexpr std::size_t kMinSlotBytes = 4 * 1024;
constexpr std::size_t kMaxSlotBytes = 64 * 1024;
constexpr int kMaxChannels = 256;
// Maximum number of a device's blocks that wait for other devices. 28 blocks of 32 KB cover 0.9 MB,
// which a link of 450 GB/s has in flight during 2 us. More would slow other kernels.
constexpr int kMaxWaitingBlocks = 32;
constexpr std::size_t kSlotStepBytes = 256;
constexpr std::size_t kPieceStepElems = 256;

}  // namespace

DeviceRing::DeviceRing(Devices& devices, std::chrono::nanoseconds timeout, const char* operation)
    : devices_(devices),
      timeout_(timeout),
      num_ranks_(static_cast<std::size_t>(devices_.world_size())),
      num_slots_(ring_num_slots(devices_.world_size())),
      num_channels_(kMaxChannels) {
  choose_channels(operation);
  const std::size_t all_slots = num_ranks_ * static_cast<std::size_t>(num_channels_) * num_slots_;
  slot_bytes_ =
      static_cast<std::uint32_t>(std::clamp(kSlotsBytes / all_slots, kMinSlotBytes, kMaxSlotBytes) /
                                 kSlotStepBytes * kSlotStepBytes);
  for (std::size_t rank = 0; rank < num_ranks_; ++rank)
    rank_memory_.push_back(make_rank_memory(rank));
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    ports_.push_back(make_ports(devices_[d]));
    records_.push_back({device_memory(devices_[d].index, sizeof(std::uint32_t)),
                        host_memory(devices_[d].index, sizeof(Failure))});
  }
}

WaitLimits DeviceRing::patience(std::size_t d, int withheld_rank) const {
  return {static_cast<std::uint64_t>(timeout_.count()), as<std::uint32_t>(records_[d].gave_up),
          as<Failure>(records_[d].failure), withheld_rank};
}

// Set gave_up by a copy, not by a kernel: waiting kernels may occupy all multiprocessors.
void DeviceRing::abort() const {
  const std::uint32_t yes = 1;
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    const int device = devices_[d].index;
    try {
      const OnDevice guard(device);
      const BesideCaptures beside;
      const Stream stream(device);
      check(cudaMemcpyAsync(records_[d].gave_up.get(), &yes, sizeof yes, cudaMemcpyHostToDevice,
                            stream.get()),
            "cudaMemcpyAsync", device);
      check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize", device);
    } catch (const Error&) {  // a failed device runs no kernel
    }
  }
}

// The failed wait at the earliest ring step names the late rank. Ranks later in the ring only wait
// for ranks that wait themselves.
std::string DeviceRing::failure(const char* operation) const {
  const auto wait_order = [](const Failure* f) { return std::pair(f->step, f->what); };
  const Failure* earliest = nullptr;
  for (const DeviceRecords& records : records_) {
    const auto* failure = as<const Failure>(records.failure);
    if (__atomic_load_n(&failure->is_set, __ATOMIC_ACQUIRE) == 0) continue;
    if (earliest == nullptr || wait_order(failure) < wait_order(earliest)) earliest = failure;
  }
  return earliest == nullptr ? "" : describe(*earliest, operation);
}

std::string DeviceRing::describe(const Failure& failure, const char* operation) const {
  const double seconds = std::chrono::duration<double>(timeout_).count();
  const auto name_of = [&](int rank) {
    return join("rank ", rank, " (cuda:", devices_.of_rank(static_cast<std::size_t>(rank)), ")");
  };
  return join(operation, ": ", name_of(failure.rank), " waited ", seconds, " s for ",
              name_of(failure.peer), " to ", failure.what == Awaited::kMessage ? "send" : "receive",
              " at step ", failure.step, " of ", ring_num_steps(devices_.world_size()), " (",
              failure.seen, " of ", failure.wanted, ")");
}

// Limit num_channels_ so that all ranks' blocks are resident at once, for every dtype.
void DeviceRing::choose_channels(const char* operation) {
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    const int index = devices_[d].index;
    const auto local = static_cast<int>(devices_[d].ranks.size());
    if (local > kMaxLocalRanks) {
      fail(ErrorKind::kUnsupported, operation, ": ", local, " ranks on cuda:", index,
           "; ring supports ", kMaxLocalRanks, ", fused and direct more");
    }
    if (devices_.size() > 1) {
      num_channels_ = std::min(num_channels_, std::max(1, kMaxWaitingBlocks / local));
    }
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      const void* kernel = kernel_function(static_cast<DType>(dtype), Fold{}, KernelKind::kRing);
      num_channels_ =
          std::min(num_channels_, devices_.most_blocks(kernel, kRingThreads)[d] / local);
    }
    if (num_channels_ == 0) {
      fail(ErrorKind::kUnsupported, operation, ": cuda:", index, " is too small for ", local,
           " ranks that wait for each other");
    }
  }
}

DeviceRing::RankMemory DeviceRing::make_rank_memory(std::size_t rank) const {
  const int here = devices_.of_rank(rank);
  const bool prev_reaches = enable_peers(devices_.of_rank(prev_of(rank)), here);
  const bool next_reaches = enable_peers(here, devices_.of_rank(next_of(rank)));
  const auto channels = static_cast<std::size_t>(num_channels_);
  const std::size_t flag_bytes = channels * kFlagBytes;
  return {shared_memory(here, prev_reaches, channels * num_slots_ * slot_bytes_),
          shared_memory(here, prev_reaches, flag_bytes),
          shared_memory(here, next_reaches, flag_bytes), device_memory(here, flag_bytes)};
}

Memory DeviceRing::make_ports(const Device& device) const {
  const auto local_index = [&](std::size_t rank) {
    const auto found = std::find(device.ranks.begin(), device.ranks.end(), static_cast<int>(rank));
    return found == device.ranks.end() ? -1
                                       : static_cast<std::int32_t>(found - device.ranks.begin());
  };
  std::vector<RingPorts> ports;
  for (const int rank : device.ranks) {
    const auto r = static_cast<std::size_t>(rank);
    const RankMemory& own = rank_memory_[r];
    const RankMemory& prev = rank_memory_[prev_of(r)];
    const RankMemory& next = rank_memory_[next_of(r)];
    ports.push_back(
        {as<std::byte>(own.slots), as<std::uint32_t>(own.flag), as<std::uint32_t>(prev.taken),
         as<std::byte>(next.slots), as<std::uint32_t>(next.flag), as<std::uint32_t>(own.taken),
         as<std::uint32_t>(own.base), local_index(prev_of(r)), local_index(next_of(r))});
  }
  const std::size_t bytes = ports.size() * sizeof(RingPorts);
  Memory memory = device_memory(device.index, bytes);
  const OnDevice guard(device.index);
  const BesideCaptures beside;
  const Stream stream(device.index);
  check(cudaMemcpyAsync(memory.get(), ports.data(), bytes, cudaMemcpyHostToDevice, stream.get()),
        "cudaMemcpyAsync", device.index);
  check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize", device.index);
  return memory;
}

// Cut chunks evenly within the slot size, so that all channels get about the same number of pieces.
DeviceRing::PieceCut DeviceRing::cut(const Buffers& tensor,
                                     const std::vector<int>& most_blocks) const {
  const std::size_t capacity = slot_bytes_ / partial_bytes(tensor.dtype) - kSlotSpareElems;
  const std::size_t chunk = chunk_range(tensor.numel, devices_.world_size(), 0).size();
  auto channels = static_cast<std::size_t>(num_channels_);
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    channels =
        std::min(channels, static_cast<std::size_t>(most_blocks[d]) / devices_[d].ranks.size());
  }
  const std::size_t even = (chunk + channels - 1) / channels;
  const std::size_t rounds = std::max<std::size_t>(1, (even + capacity - 1) / capacity);
  const std::size_t each = (even + rounds - 1) / rounds;
  const std::size_t rounded = (each + kPieceStepElems - 1) / kPieceStepElems * kPieceStepElems;
  const std::size_t piece = std::clamp(rounded, kPieceStepElems, capacity);
  const std::size_t pieces = num_pieces(tensor.numel, devices_.world_size(), piece);
  return {piece, static_cast<int>(std::min(channels, pieces))};
}

RingArgs DeviceRing::arguments(std::size_t d, const Buffers& tensor, Fold fold,
                               const PieceCut& cut) const {
  RingArgs args{};
  args.ports = as<const RingPorts>(ports_[d]);
  args.numel = tensor.numel;
  args.piece_elems = static_cast<std::uint32_t>(cut.piece_elems);
  args.num_slots = num_slots_;
  args.slot_bytes = slot_bytes_;
  args.world_size = devices_.world_size();
  args.num_channels = cut.num_channels;
  args.divisor = Divisor::of(fold.divisor);
  args.phases = tensor.phases;
  const std::vector<int>& ranks = devices_[d].ranks;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    args.rank[i] = ranks[i];
    args.input[i] = tensor.sources[ranks[i]];
    args.output[i] = tensor.destinations[ranks[i]];
  }
  return args;
}

void DeviceRing::launch(const Buffers& tensor, Fold fold, Streams streams, int withheld_rank) {
  const void* kernel = kernel_function(tensor.dtype, fold, KernelKind::kRing);
  const PieceCut pieces = cut(tensor, devices_.most_blocks(kernel, kRingThreads));
  if (pieces.num_channels == 0) return;
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    RingArgs args = arguments(d, tensor, fold, pieces);
    args.patience = patience(d, withheld_rank);
    const auto blocks = static_cast<unsigned>(devices_[d].ranks.size()) *
                        static_cast<unsigned>(pieces.num_channels);
    const OnDevice guard(devices_[d].index);
    void* arguments[] = {&args};
    check(cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(kRingThreads), arguments, 0,
                                      streams[d]),
          "launch of ring", devices_[d].index);
  }
}

}  // namespace pyringar::cuda
