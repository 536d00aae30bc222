// collective: one validated call of a group, with the tensors of the ranks in this process.
// Units     elements. The caller keeps the tensors' memory alive until the call is done.
// Contract  bindings/prepare creates a Collective; the groups of all transports run it. Pointer
//           tables point into `pointers`, which never grows. A Collective may be moved.
// Tests     tests/cpp/group_test.cpp, tests/cpp/process_test.cpp, tests/cpp/cuda_host
#pragma once

#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/fold.h"
#include "core/ring_program.h"

namespace pyringar {

inline constexpr int kHost = -1;  // device index of host memory

enum class Algorithm : std::uint8_t { kFused, kDirect, kRing };
inline constexpr int kNumAlgorithms = 3;

constexpr const char* algorithm_name(Algorithm algorithm) {
  constexpr const char* kNames[kNumAlgorithms] = {"fused", "direct", "ring"};
  return kNames[static_cast<int>(algorithm)];
}

enum class CallKind : std::uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kBarrier,
};

constexpr const char* call_name(CallKind kind) {
  constexpr const char* kNames[] = {"all_reduce", "reduce_scatter", "all_gather",
                                    "broadcast",  "reduce",         "barrier"};
  return kNames[static_cast<int>(kind)];
}

struct TensorSpan {
  std::byte* data;
  std::size_t numel;
  DType dtype;
  std::size_t bytes() const { return numel * item_bytes(dtype); }
};

// One tensor of a call: its sources on the local ranks, in rank order, and its destinations.
struct Buffers {
  const void* const* sources;
  void* const* destinations;
  int num_sources;
  int num_destinations;
  std::size_t numel;
  DType dtype;
  // Read by rings and by ranks in processes, where a rank has one source and one destination.
  // kReduceScatter: a source has numel elements, a destination one chunk. kAllGather: the reverse.
  RingPhases phases = RingPhases::kAllReduce;

  bool is_in_place() const { return sources == destinations; }
  std::size_t traffic_bytes() const {
    return numel * item_bytes(dtype) * static_cast<std::size_t>(num_sources + num_destinations);
  }
};

// How memory stores an element: as is, with a flipped sign bit, or as the two's complement.
enum class Sign : std::uint8_t { kPlain, kBit, kComplement };

// A tensor with arbitrary strides. Shape and strides count elements, `item` is bytes per element.
struct StridedView {
  std::byte* data;
  std::size_t item;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  Sign sign = Sign::kPlain;
};

// A non-contiguous host tensor and the dense copy that the collective works on.
struct PackedTensor {
  StridedView view;
  std::shared_ptr<std::byte[]> dense;
  bool is_input;
  bool is_output;
};

inline std::uint64_t mix(std::uint64_t digest, std::uint64_t value) {
  // Multiplying by an odd number loses no bit; the rotation moves high bits to low positions.
  return std::rotl((digest ^ value) * 0x9E3779B97F4A7C15u, 29) + 1;
}

// Properties of a call that ranks in different processes compare before they run it.
struct RemoteCall {
  std::string what;           // text of the user's call, if this call replaces it; else empty
  std::uint64_t shapes = 0;   // digest of tensor sizes
  std::uint64_t strides = 0;  // digest of the strides in `permuted`; 0 if it is empty

  // Dense in-place tensors whose memory order differs from index order. Ranks reduce them in memory
  // order if all ranks have the same strides, else in index order.
  struct Permuted {
    std::size_t tensor;
    StridedView view;
    bool is_output;
  };
  std::vector<Permuted> permuted;
};

struct Collective {
  Collective() = default;
  Collective(Collective&&) = default;
  Collective& operator=(Collective&&) = default;

  CallKind kind = CallKind::kAllReduce;
  const char* operation = "collective";  // name in error messages
  Algorithm algorithm = Algorithm::kFused;
  Fold fold;
  int root = 0;
  std::size_t bytes = 0;  // size of one rank's tensors
  int num_local = 1;
  int world_size = 1;
  std::vector<Buffers> tensors;
  std::vector<void*> pointers;  // must not grow: `tensors` point into this vector
  std::vector<int> ranks;       // rank that owns the memory at each pointer
  RemoteCall remote;
  // Caches of a CUDA group: whether peers cannot read the tensors; its FusedLaunches.
  mutable std::optional<bool> needs_staging;
  mutable std::shared_ptr<const void> launches;

  std::vector<PackedTensor> packed;

  std::size_t index_of(const void* const* table) const {
    return static_cast<std::size_t>(table - static_cast<const void* const*>(pointers.data()));
  }

  // Reserve room for two pointers per tensor. Call it before add_local().
  void reserve_local(std::size_t num_tensors) {
    tensors.reserve(num_tensors);
    pointers.reserve(2 * num_tensors);
  }
  void add_local(void* source, void* destination, std::size_t numel, DType dtype) {
    const RingPhases phases = kind == CallKind::kReduceScatter ? RingPhases::kReduceScatter
                              : kind == CallKind::kAllGather   ? RingPhases::kAllGather
                                                               : RingPhases::kAllReduce;
    void* const* table = pointers.data() + pointers.size();
    pointers.push_back(source);
    if (destination != source) pointers.push_back(destination);
    bytes += numel * item_bytes(dtype);
    tensors.push_back(
        {table, destination == source ? table : table + 1, 1, 1, numel, dtype, phases});
  }
  TensorSpan local_source(std::size_t i) const {
    const Buffers& t = tensors[i];
    return {static_cast<std::byte*>(const_cast<void*>(t.sources[0])),
            elements_of(t, RingPhases::kAllGather), t.dtype};
  }
  TensorSpan local_destination(std::size_t i) const {
    const Buffers& t = tensors[i];
    return {static_cast<std::byte*>(t.destinations[0]), elements_of(t, RingPhases::kReduceScatter),
            t.dtype};
  }

  Collective copy() const {
    Collective copied(*this);
    for (Buffers& tensor : copied.tensors) {
      tensor.sources = copied.pointers.data() + index_of(tensor.sources);
      tensor.destinations = copied.pointers.data() + index_of(tensor.destinations);
    }
    copied.needs_staging.reset();
    copied.launches.reset();
    return copied;
  }

 private:
  // The copy's `tensors` point into the pointers of the original: copy() corrects that.
  Collective(const Collective&) = default;

  std::size_t elements_of(const Buffers& tensor, RingPhases chunked) const {
    return tensor.phases == chunked ? tensor.numel / static_cast<std::size_t>(world_size)
                                    : tensor.numel;
  }
};

// Statistics per algorithm: calls, bytes, and the time that host threads spent in the calls.
template <int kNum>
struct CallStats {
  std::array<std::uint64_t, kNum> calls{};
  std::array<std::uint64_t, kNum> bytes{};
  std::array<std::uint64_t, kNum> busy_ns{};

  template <typename Algorithm>
  void add(Algorithm algorithm, std::size_t call_bytes, std::chrono::nanoseconds busy) {
    const auto i = static_cast<std::size_t>(algorithm);
    calls[i] += 1;
    bytes[i] += call_bytes;
    busy_ns[i] += static_cast<std::uint64_t>(busy.count());
  }
};
using GroupStats = CallStats<kNumAlgorithms>;

}  // namespace pyringar
