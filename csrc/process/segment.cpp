// segment: offsets, and the checks of a segment that another process laid out.
#include "process/segment.h"

#include <cstring>
#include <new>

#include "core/error.h"

namespace pyringar {

namespace {

constexpr std::uint32_t kVersion = 10;  // version of the layout
constexpr std::size_t kPage = 4096;

static_assert(std::atomic<std::uint32_t>::is_always_lock_free &&
                  std::atomic<std::int64_t>::is_always_lock_free,
              "a lock would not work between processes");

constexpr std::size_t round_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

struct Layout {
  explicit constexpr Layout(int world_size) : k(static_cast<std::size_t>(world_size)) {}

  std::size_t k;
  std::size_t lines = round_up(sizeof(SegmentHeader), kPage);
  std::size_t devices = lines + round_up(k * sizeof(RankLine), kPage);
  std::size_t heads = devices + round_up(k * sizeof(DeviceLine), kPage);
  std::size_t staging = heads + round_up(k * kStagingSlots * sizeof(MessageHead), kPage);
  std::size_t total = staging + k * kStagingSlots * kSlotBytes;
};

}  // namespace

std::uint64_t CallRecord::digest() const {
  std::uint64_t digest = 0;
  for (const std::uint64_t word :
       {sequence, numel, shapes, strides,
        std::uint64_t{num_tensors} << 32 | std::uint32_t{divisor} << 8 |
            static_cast<std::uint32_t>(order),
        std::uint64_t{static_cast<std::uint32_t>(root)} << 32 |
            static_cast<std::uint32_t>(kind) << 24 | static_cast<std::uint32_t>(dtype) << 16 |
            static_cast<std::uint32_t>(op)}) {
    digest = mix(digest, word);
  }
  for (const char letter : what) {
    if (letter == '\0') break;
    digest = mix(digest, static_cast<unsigned char>(letter));
  }
  return digest;
}

std::string CallRecord::text() const {
  const std::string number = sequence > 0 ? join("call ", sequence, ", ") : "";
  if (what[0] != '\0') return number + std::string(what.data(), strnlen(what.data(), what.size()));
  const std::string call = number + call_name(kind);
  if (kind == CallKind::kBarrier) return call;
  const bool reduces = kind == CallKind::kAllReduce || kind == CallKind::kReduceScatter;
  const char* const order_text = order == Order::kTree    ? " in tree order"
                                 : order == Order::kExact ? ", exact"
                                                          : "";
  return join(call, reduces ? join(" (", op_name(op), order_text, ")") : "",
              kind == CallKind::kBroadcast ? join(" from rank ", root) : "", " of ", numel, " ",
              dtype_name(dtype), " elements",
              num_tensors > 1 ? join(" in ", num_tensors, " tensors") : "");
}

std::size_t Segment::bytes_for(int world_size) { return Layout(world_size).total; }

Segment::Segment(std::byte* memory, int world_size)
    : header_(std::launder(reinterpret_cast<SegmentHeader*>(memory))), world_size_(world_size) {
  const Layout layout(world_size);
  lines_ = std::launder(reinterpret_cast<RankLine*>(memory + layout.lines));
  devices_ = std::launder(reinterpret_cast<DeviceLine*>(memory + layout.devices));
  heads_ = std::launder(reinterpret_cast<MessageHead*>(memory + layout.heads));
  staging_ = memory + layout.staging;
}

std::size_t Segment::devices_bytes() const {
  const Layout layout(world_size_);
  return layout.heads - layout.devices;
}

Segment Segment::lay_out(std::byte* memory, int world_size, const SegmentToken& token,
                         const std::vector<int>& global_ranks) {
  const Layout layout(world_size);
  for (int rank = 0; rank < world_size; ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    auto* line = new (memory + layout.lines + r * sizeof(RankLine)) RankLine;
    line->global_rank = global_ranks.empty() ? rank : global_ranks.at(r);
    new (memory + layout.devices + r * sizeof(DeviceLine)) DeviceLine;
    for (std::size_t i = r * kStagingSlots; i < (r + 1) * kStagingSlots; ++i) {
      new (memory + layout.heads + i * sizeof(MessageHead)) MessageHead;
    }
  }
  new (memory) SegmentHeader{kVersion, token, {}};
  return {memory, world_size};
}

Segment Segment::attach(std::byte* memory, int world_size, const SegmentToken& token) {
  const auto* header = std::launder(reinterpret_cast<const SegmentHeader*>(memory));
  if (header->version != kVersion || header->token != token) {
    fail(ErrorKind::kState,
         "the shared memory is another group's, or belongs to another version of pyringar");
  }
  return {memory, world_size};
}

}  // namespace pyringar
