// ring_links: see the header.
//
// Tests     tests/cpp/cuda_host/group_test.cpp

#include "cuda/ring_links.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/schedule.h"
#include "cuda/kernels.h"
#include "cuda/peers.h"

namespace pyringar::cuda {

namespace {

// Slots of all links together: a third of the L2 of an A100 or H200, so that pieces stay in it.
constexpr std::size_t kSlotsBytes = std::size_t{16} << 20;
constexpr std::size_t kMinSlotBytes = 4 * 1024;
constexpr std::size_t kMaxSlotBytes = 64 * 1024;
constexpr int kMaxChannels = 128;
// Slots and pieces are multiples of these.
constexpr std::size_t kSlotStepBytes = 256;
constexpr std::size_t kPieceStepElems = 256;

}  // namespace

RingLinks::RingLinks(Devices& devices, const char* operation)
    : devices_(devices),
      num_ranks_(static_cast<std::size_t>(devices.world_size())),
      num_slots_(ring_num_slots(devices.world_size())),
      num_channels_(kMaxChannels) {
  choose_channels(operation);
  const std::size_t all_slots = num_ranks_ * static_cast<std::size_t>(num_channels_) * num_slots_;
  slot_bytes_ =
      static_cast<std::uint32_t>(std::clamp(kSlotsBytes / all_slots, kMinSlotBytes, kMaxSlotBytes) /
                                 kSlotStepBytes * kSlotStepBytes);
  for (std::size_t rank = 0; rank < num_ranks_; ++rank) ends_.push_back(make_end(rank));
  for (std::size_t d = 0; d < devices.size(); ++d) ports_.push_back(make_ports(devices[d]));
}

// As many as all ranks of every device can have on it at once, whatever the dtype.
void RingLinks::choose_channels(const char* operation) {
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    const int index = devices_[d].index;
    const auto local = static_cast<int>(devices_[d].ranks.size());
    if (local > kMaxLocalRanks) {
      fail(ErrorKind::kUnsupported, operation, ": ", local, " ranks on cuda:", index,
           "; ring supports ", kMaxLocalRanks, ", fused and direct more");
    }
    for (int dtype = 0; dtype < kNumDTypes; ++dtype) {
      const void* kernel =
          kernel_function(static_cast<DType>(dtype), ReduceOp::kSum, KernelKind::kRing);
      num_channels_ =
          std::min(num_channels_, devices_.most_blocks(kernel, kRingThreads)[d] / local);
    }
    if (num_channels_ == 0) {
      fail(ErrorKind::kUnsupported, operation, ": cuda:", index, " is too small for ", local,
           " ranks that wait for each other");
    }
  }
}

RingLinks::End RingLinks::make_end(std::size_t rank) const {
  const int here = devices_.of_rank(rank);
  const bool prev_reaches = enable_peers(devices_.of_rank(prev_of(rank)), here);
  const bool next_reaches = enable_peers(here, devices_.of_rank(next_of(rank)));
  const auto channels = static_cast<std::size_t>(num_channels_);
  const std::size_t flag_bytes = channels * kFlagBytes;
  return {shared_memory(here, prev_reaches, channels * num_slots_ * slot_bytes_),
          shared_memory(here, prev_reaches, flag_bytes),
          shared_memory(here, next_reaches, flag_bytes), device_memory(here, flag_bytes)};
}

Memory RingLinks::make_ports(const Device& device) const {
  std::vector<RingPorts> ports;
  for (const int rank : device.ranks) {
    const End& own = ends_[static_cast<std::size_t>(rank)];
    const End& prev = ends_[prev_of(static_cast<std::size_t>(rank))];
    const End& next = ends_[next_of(static_cast<std::size_t>(rank))];
    ports.push_back({as<std::byte>(own.slots), as<std::uint32_t>(own.flag),
                     as<std::uint32_t>(prev.taken), as<std::byte>(next.slots),
                     as<std::uint32_t>(next.flag), as<std::uint32_t>(own.taken),
                     as<std::uint32_t>(own.base)});
  }
  const std::size_t bytes = ports.size() * sizeof(RingPorts);
  Memory memory = device_memory(device.index, bytes);
  const OnDevice guard(device.index);
  check(cudaMemcpy(memory.get(), ports.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy",
        device.index);
  return memory;
}

// Short chunks are cut finer, so that every channel has a piece.
RingLinks::Cut RingLinks::cut(const Buffers& tensor, const std::vector<int>& most_blocks) const {
  const std::size_t capacity = slot_bytes_ / partial_bytes(tensor.dtype) - kSlotSpareElems;
  const std::size_t chunk = chunk_range(tensor.numel, devices_.world_size(), 0).size();
  auto channels = static_cast<std::size_t>(num_channels_);
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    channels =
        std::min(channels, static_cast<std::size_t>(most_blocks[d]) / devices_[d].ranks.size());
  }
  const std::size_t even = (chunk + channels - 1) / channels;
  const std::size_t rounded = (even + kPieceStepElems - 1) / kPieceStepElems * kPieceStepElems;
  const std::size_t piece = std::clamp(rounded, kPieceStepElems, capacity);
  const std::size_t pieces = num_pieces(tensor.numel, devices_.world_size(), piece);
  return {piece, static_cast<int>(std::min(channels, pieces))};
}

RingArgs RingLinks::arguments(std::size_t d, const Buffers& tensor, Fold fold,
                              const Cut& cut) const {
  RingArgs args{};
  args.ports = as<const RingPorts>(ports_[d]);
  args.numel = tensor.numel;
  args.piece_elems = static_cast<std::uint32_t>(cut.piece_elems);
  args.num_slots = num_slots_;
  args.slot_bytes = slot_bytes_;
  args.world_size = devices_.world_size();
  args.num_channels = cut.num_channels;
  args.divisor = fold.divisor;
  args.phases = tensor.phases;
  args.patience = devices_.patience(d);
  const std::vector<int>& ranks = devices_[d].ranks;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    args.rank[i] = ranks[i];
    args.input[i] = tensor.sources[ranks[i]];
    args.output[i] = tensor.destinations[ranks[i]];
  }
  return args;
}

void RingLinks::launch(const Buffers& tensor, Fold fold, Streams streams) {
  const void* kernel = kernel_function(tensor.dtype, fold.op, KernelKind::kRing);
  const Cut parts = cut(tensor, devices_.most_blocks(kernel, kRingThreads));
  if (parts.num_channels == 0) return;
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    RingArgs args = arguments(d, tensor, fold, parts);
    const auto blocks =
        static_cast<unsigned>(devices_[d].ranks.size()) * static_cast<unsigned>(parts.num_channels);
    const OnDevice guard(devices_[d].index);
    void* arguments[] = {&args};
    check(cudaLaunchCooperativeKernel(kernel, dim3(blocks), dim3(kRingThreads), arguments, 0,
                                      streams[d]),
          "launch of ring", devices_[d].index);
  }
}

}  // namespace pyringar::cuda
