// ring_links: links of the ring between ranks on GPUs, and its launches.
//
// Floor     cuda
// Tests     tests/cpp/cuda_host/group_test.cpp, tests/test_cuda.py

#include "cuda/group.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "cuda/kernels.h"
#include "cuda/peers.h"

namespace pyringar::cuda {

namespace {

// Slots of all links together: a third of the L2 of an A100 or H200, so that pieces stay in it.
constexpr std::size_t kSlotsBytes = std::size_t{16} << 20;
constexpr std::size_t kMinSlotBytes = 4 * 1024;
constexpr std::size_t kMaxSlotBytes = 64 * 1024;
constexpr int kMaxChannels = 128;

}  // namespace

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
