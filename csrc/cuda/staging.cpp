// staging: tensors that not all devices can reach, in buffers that they can.
//
// Floor     cuda
// Tests     tests/cpp/cuda_host/group_test.cpp, tests/test_cuda.py

#include "cuda/group.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "cuda/peers.h"

namespace pyringar::cuda {

void refuse_in_capture(const char* operation) {
  fail(ErrorKind::kState, operation,
       ": the first call of this kind allocates memory, which a CUDA graph cannot capture; call it "
       "once with these sizes before the capture begins");
}

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

}  // namespace pyringar::cuda
