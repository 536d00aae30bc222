// segment: offsets, and the checks of a segment that another process laid out.
//
// Tests     tests/test_processes.py, tests/cpp/process_test.cpp

#include "process/segment.h"

#include <algorithm>
#include <new>

#include "core/error.h"

namespace pyringar {

namespace {

constexpr std::uint64_t kMagic = 0x70795269'6e676172;  // "pyRingar"
constexpr std::uint32_t kVersion = 6;
constexpr std::size_t kPage = 4096;

static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
                  std::atomic<std::int64_t>::is_always_lock_free,
              "a lock would be one process's own");

static_assert(kSlotBytes / Segment::kMaxRanks >= 64);

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

struct Layout {
  std::size_t lines, devices, heads, staging, ring, total, ring_slot_bytes;

  explicit constexpr Layout(int world_size)
      : lines(round_up(sizeof(SegmentHeader), kPage)),
        devices(0),
        heads(0),
        staging(0),
        ring(0),
        total(0),
        ring_slot_bytes(pyringar::ring_slot_bytes(world_size)) {
    const auto k = static_cast<std::size_t>(world_size);
    devices = lines + round_up(k * sizeof(RankLine), kPage);
    heads = devices + round_up(k * sizeof(DeviceLine), kPage);
    staging = heads + round_up(k * kStagingSlots * sizeof(MessageHead), kPage);
    ring = staging + k * kStagingSlots * kSlotBytes;
    total = round_up(ring + k * ring_num_slots(world_size) * ring_slot_bytes, kPage);
  }
};

}  // namespace

const char* call_name(CallKind kind) {
  constexpr const char* kNames[kNumCallKinds] = {"all_reduce", "reduce_scatter", "all_gather",
                                                 "broadcast", "barrier"};
  const auto i = static_cast<std::size_t>(kind);
  return i < kNumCallKinds ? kNames[i] : "unknown call";
}

bool CallRecord::agrees(const CallRecord& other) const {
  return sequence == other.sequence && kind == other.kind && op == other.op &&
         dtype == other.dtype && divisor == other.divisor && order == other.order &&
         root == other.root && algorithm == other.algorithm && numel == other.numel &&
         num_tensors == other.num_tensors && shapes == other.shapes;
}

std::uint64_t CallRecord::digest() const {
  std::uint64_t digest = 0;
  for (const std::uint64_t word :
       {sequence, numel, shapes, strides, offsets,
        std::uint64_t{num_tensors} << 32 | std::uint32_t{divisor} << 8 |
            static_cast<std::uint32_t>(order),
        std::uint64_t{static_cast<std::uint32_t>(root)} << 32 |
            static_cast<std::uint32_t>(kind) << 24 | static_cast<std::uint32_t>(dtype) << 16 |
            static_cast<std::uint32_t>(op) << 8 | algorithm}) {
    digest = mix(digest, word);
  }
  return digest;
}

std::string CallRecord::text() const {
  const std::string number = sequence > 0 ? join("call ", sequence, ", ") : "";
  const std::string call = number + call_name(kind);
  if (kind == CallKind::kBarrier) return call;
  const bool reduces = kind == CallKind::kAllReduce || kind == CallKind::kReduceScatter;
  const bool op_is_known = static_cast<int>(op) < kNumReduceOps;
  const bool dtype_is_known = static_cast<int>(dtype) < kNumDTypes;
  const char* op_text = divisor > 1 ? "mean" : op_is_known ? op_name(op) : "unknown reduction";
  const char* const order_text = order == Order::kTree    ? " in tree order"
                                 : order == Order::kExact ? ", exact"
                                                          : "";
  return join(call, reduces ? join(" (", op_text, order_text, ")") : "",
              kind == CallKind::kBroadcast ? join(" from rank ", root) : "", " of ", numel, " ",
              dtype_is_known ? dtype_name(dtype) : "unknown", " elements",
              num_tensors > 1 ? join(" in ", num_tensors, " tensors") : "",
              offsets != 0 ? ", registered" : "");
}

std::size_t Segment::bytes_for(int world_size) {
  if (world_size > kMaxRanks) {
    fail(ErrorKind::kArgument, "world_size is ", world_size, ", expected at most ", kMaxRanks,
         " ranks in processes of one machine");
  }
  return Layout(world_size).total;
}

Segment::Segment(std::byte* memory, int world_size)
    : header_(std::launder(reinterpret_cast<SegmentHeader*>(memory))),
      world_size_(world_size),
      slot_bytes_(kSlotBytes) {
  const Layout layout(world_size);
  lines_ = std::launder(reinterpret_cast<RankLine*>(memory + layout.lines));
  devices_ = std::launder(reinterpret_cast<DeviceLine*>(memory + layout.devices));
  heads_ = std::launder(reinterpret_cast<MessageHead*>(memory + layout.heads));
  staging_ = memory + layout.staging;
  ring_ = memory + layout.ring;
  ring_slot_bytes_ = layout.ring_slot_bytes;
}

std::size_t Segment::devices_bytes() const {
  const Layout layout(world_size_);
  return layout.heads - layout.devices;
}

Segment Segment::lay_out(std::byte* memory, int world_size, const SegmentToken& token) {
  const Layout layout(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    new (memory + layout.lines + r * sizeof(RankLine)) RankLine;
    new (memory + layout.devices + r * sizeof(DeviceLine)) DeviceLine;
    for (std::size_t i = r * kStagingSlots; i < (r + 1) * kStagingSlots; ++i) {
      new (memory + layout.heads + i * sizeof(MessageHead)) MessageHead;
    }
  }
  new (memory) SegmentHeader{kMagic,       kVersion,   static_cast<std::uint32_t>(world_size),
                             layout.total, kSlotBytes, layout.ring_slot_bytes,
                             token,        {}};
  return {memory, world_size};
}

Segment Segment::attach(std::byte* memory, std::size_t bytes, int world_size,
                        const SegmentToken& token) {
  const Layout layout(world_size);
  if (bytes != layout.total) {
    fail(ErrorKind::kState, "the group's shared memory has ", bytes, " bytes, expected ",
         layout.total, " for ", world_size, " ranks");
  }
  const auto* header = std::launder(reinterpret_cast<const SegmentHeader*>(memory));
  if (header->magic != kMagic || header->token != token) {
    fail(ErrorKind::kState, "the group's shared memory is another group's, or none of ours");
  }
  if (header->version != kVersion || header->total_bytes != layout.total ||
      header->world_size != static_cast<std::uint32_t>(world_size) ||
      header->slot_bytes != kSlotBytes || header->ring_slot_bytes != layout.ring_slot_bytes) {
    fail(ErrorKind::kState,
         "the group's shared memory was laid out by another version of "
         "pyringar: version ",
         header->version, " for ", header->world_size, " ranks, expected ", kVersion, " for ",
         world_size);
  }
  return {memory, world_size};
}

}  // namespace pyringar
