// collective: one call on all ranks of a group, checked and ready to run.
//
// Units     elements; the tensors' memory is borrowed: the caller keeps it alive.
// Contract  bindings/prepare makes it, the groups of cpu/ and cuda/ run it. Pointer tables point
//           into `pointers`, which therefore never grows again; a Collective may be moved.
// Threads   none.
// Tests     tests/cpp/group_test.cpp, tests/cpp/cuda_host/group_test.cpp
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/dtype.h"
#include "core/fold.h"
#include "core/ring_program.h"

namespace pyringar {

inline constexpr int kHost = -1;  // in place of the index of a GPU

enum class Algorithm : std::uint8_t { kFused, kDirect, kRing };
inline constexpr int kNumAlgorithms = 3;

constexpr const char* algorithm_name(Algorithm algorithm) {
  constexpr const char* kNames[kNumAlgorithms] = {"fused", "direct", "ring"};
  return kNames[static_cast<int>(algorithm)];
}

// One tensor over all ranks: its inputs in rank order, and where the result goes.
struct Buffers {
  const void* const* sources;
  void* const* destinations;
  int num_sources;
  int num_destinations;
  std::size_t numel;
  DType dtype;
  // For a ring, which has a source and a destination per rank. kReduceScatter: sources of numel,
  // destinations hold chunk r; kAllGather the other way round.
  RingPhases phases = RingPhases::kAllReduce;

  bool is_in_place() const { return sources == destinations; }
  std::size_t traffic_bytes() const {
    return numel * item_bytes(dtype) * static_cast<std::size_t>(num_sources + num_destinations);
  }
};

// How memory holds an element: as it is, or negated as torch does lazily, in a float's sign bit or
// an integer's two's complement.
enum class Sign : std::uint8_t { kPlain, kBit, kComplement };

// A tensor whose elements need not lie side by side. Shape and strides in elements.
struct StridedView {
  std::byte* data;
  std::size_t item;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  Sign sign = Sign::kPlain;
};

// A tensor with gaps, in the host's memory, and its dense copy.
struct PackedTensor {
  StridedView view;
  std::shared_ptr<std::byte[]> dense;
  bool is_input;
  bool is_output;
};

struct Collective {
  Collective() = default;
  Collective(Collective&&) = default;  // not copied: `tensors` point into `pointers`
  Collective& operator=(Collective&&) = default;

  const char* operation = "collective";  // as the caller knows it, for messages
  Algorithm algorithm = Algorithm::kFused;
  Fold fold;
  std::size_t bytes = 0;  // of one rank's data
  int num_ranks = 1;
  std::vector<Buffers> tensors;
  std::vector<void*> pointers;  // reserved, never regrown
  std::vector<int> ranks;       // whose memory each of them is
  // Kept by the group that runs it: what the driver said, and a GPU group's FusedLaunches.
  mutable std::optional<bool> needs_staging;
  mutable std::shared_ptr<const void> launches;

  // Where in `pointers` a table begins.
  std::size_t index_of(const void* const* table) const {
    return static_cast<std::size_t>(table - static_cast<const void* const*>(pointers.data()));
  }

  std::vector<PackedTensor> packed;
};

// What ran so far, by algorithm. busy_ns: of threads of the host.
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
