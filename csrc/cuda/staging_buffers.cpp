// staging_buffers: copies tensors to and from the staging buffers.
#include "cuda/staging_buffers.h"

#include <algorithm>
#include <cstring>

#include "cuda/peers.h"

namespace pyringar::cuda {

namespace {

constexpr std::size_t kAlignment = 256;  // bytes; of every tensor in a buffer

struct PointerUse {
  bool is_source;
  bool is_destination;
};

// Call visit(index in `pointers`, bytes, PointerUse) once for every pointer of the call.
template <typename Visit>
void for_each_pointer(const Collective& collective, Visit&& visit) {
  for (const Buffers& tensor : collective.tensors) {
    const auto visit_all = [&](const void* const* table, int count, PointerUse use) {
      const std::size_t first = collective.index_of(table);
      for (int i = 0; i < count; ++i) {
        visit(first + static_cast<std::size_t>(i), tensor.numel * item_bytes(tensor.dtype), use);
      }
    };
    visit_all(tensor.sources, tensor.num_sources, {true, tensor.is_in_place()});
    if (!tensor.is_in_place()) {
      visit_all(tensor.destinations, tensor.num_destinations, {false, true});
    }
  }
}

}  // namespace

StagingBuffers::StagingBuffers(const Devices& devices)
    : devices_(devices),
      is_on_host_(devices_.has_host_ranks() || !devices_.has_peers()),
      buffers_(static_cast<std::size_t>(devices_.world_size())) {}

bool StagingBuffers::is_needed(const Collective& collective) const {
  if (is_on_host_) return true;
  if (devices_.size() == 1) return false;
  return std::any_of(
      collective.pointers.begin(), collective.pointers.end(),
      [](const void* pointer) { return pointer != nullptr && !is_peer_visible(pointer); });
}

void StagingBuffers::reserve(std::size_t rank, std::size_t bytes, const Events& last_use) {
  Buffer& buffer = buffers_[rank];
  if (buffer.bytes >= bytes) return;
  last_use.wait_for();  // needed: cudaFreeHost may not wait
  // Double the size: each free and allocation waits for the device.
  const std::size_t wanted = std::max(bytes, 2 * buffer.bytes);
  const auto lock = lock_launches();
  buffer = {};
  const int device = devices_.of_rank(rank) == kHost ? devices_[0].index : devices_.of_rank(rank);
  buffer.memory = shared_memory(device, !is_on_host_, wanted);
  buffer.bytes = wanted;
}

std::vector<std::size_t> StagingBuffers::lay_out(const Collective& collective,
                                                 const Events& last_use) {
  std::vector<std::size_t> used(buffers_.size());
  std::vector<std::size_t> offsets(collective.pointers.size());
  for_each_pointer(collective, [&](std::size_t at, std::size_t bytes, PointerUse) {
    std::size_t& next = used[static_cast<std::size_t>(collective.ranks[at])];
    offsets[at] = next;
    next += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  });
  for (std::size_t rank = 0; rank < used.size(); ++rank) {
    reserve(rank, used[rank], last_use);
  }
  return offsets;
}

Collective StagingBuffers::copy_in(const Collective& collective, Streams streams,
                                   const Events& last_use) {
  const std::vector<std::size_t> offsets = lay_out(collective, last_use);
  Collective staged = collective.copy();
  for_each_pointer(collective, [&](std::size_t at, std::size_t bytes, PointerUse use) {
    const auto rank = static_cast<std::size_t>(collective.ranks[at]);
    const int device = devices_.of_rank(rank);
    staged.pointers[at] = as<std::byte>(buffers_[rank].memory, offsets[at]);
    if (!use.is_source || bytes == 0) return;
    if (device == kHost) {
      std::memcpy(staged.pointers[at], collective.pointers[at], bytes);
    } else {
      copy_later(staged.pointers[at], collective.pointers[at], bytes, device, streams);
    }
  });
  return staged;
}

void StagingBuffers::copy_out(const Collective& collective, const Collective& staged,
                              Streams streams) const {
  const auto device_of = [&](std::size_t at) {
    return devices_.of_rank(static_cast<std::size_t>(collective.ranks[at]));
  };
  for_each_pointer(collective, [&](std::size_t at, std::size_t bytes, PointerUse use) {
    if (!use.is_destination || bytes == 0 || device_of(at) == kHost) return;
    copy_later(collective.pointers[at], staged.pointers[at], bytes, device_of(at), streams);
  });
  if (!devices_.has_host_ranks()) return;
  // Wait until host tensors hold the results, since no stream orders their readers.
  for (std::size_t d = 0; d < devices_.size(); ++d) {
    const OnDevice guard(devices_[d].index);
    const BesideCaptures beside;
    check(cudaStreamSynchronize(streams[d]), "cudaStreamSynchronize", devices_[d].index);
  }
  for_each_pointer(collective, [&](std::size_t at, std::size_t bytes, PointerUse use) {
    if (!use.is_destination || bytes == 0 || device_of(at) != kHost) return;
    std::memcpy(collective.pointers[at], staged.pointers[at], bytes);
  });
}

void StagingBuffers::copy_later(void* to, const void* from, std::size_t bytes, int device,
                                Streams streams) const {
  const OnDevice guard(device);
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, streams[devices_.position_of(device)]),
        "cudaMemcpyAsync", device);
}

}  // namespace pyringar::cuda
