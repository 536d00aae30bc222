// staged_engines: engines for core/staged_program.h, written once for host memory
// (process/process_call) and GPU memory (cuda_process).
// Contract  Rank order for each size and cut into pieces. A rank reads its own data in its tensors,
//           and the data of other ranks in their slots. Memory is a StagedCounters and provides
//             slot(rank, n), own_slot(n)     address of message n of a rank
//             slice_of(range, owner)         the slice that a rank reduces in a direct call
//             to_slot(), from_slot()         batches: add_copy(to, from, bytes, dtype)
//             folds(num_destinations, ahead) a batch: add(dtype, sources, destinations, numel);
//                                            ahead: distance in bytes to prefetch, or 0
//             launch(batch)                  runs or enqueues the batch
//             kChunkAlignment                alignment of a rank's chunk in a slot
// Tests     tests/conformance/test_bits.py, tests/cpp/process_test.cpp, tests/cpp/cuda_processes
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/schedule.h"
#include "process/process_call.h"

namespace pyringar {

constexpr std::size_t pieces_of(std::size_t bytes, std::size_t piece_bytes) {
  return std::max<std::size_t>(1, (bytes + piece_bytes - 1) / piece_bytes);
}

// Return the owner's slice of a range of bytes. Slices begin at multiples of `unit` from its begin.
constexpr Range slice_in_units(Range range, int world_size, int owner, std::size_t unit) {
  const Range units = chunk_range((range.size() + unit - 1) / unit, world_size, owner);
  return {std::min(range.begin + units.begin * unit, range.end),
          std::min(range.begin + units.end * unit, range.end)};
}

class StagedCounters {
 public:
  explicit StagedCounters(ProcessRank& self)
      : self_(self), segment_(self.segment), world_size_(segment_.world_size()) {}

  void announce(std::uint32_t n) {
    self_.sleep_in(Phase::kAnnounce);
    MessageHead& head = segment_.head(self_.rank, n);
    head.call_digest = self_.call_digest;
    head.number.store(n, std::memory_order_release);
    line(self_.rank).announced.set(n, kWakeAll, Scope::kProcesses);
    self_.on_announce();
  }
  bool wait_announced(std::uint32_t n) {
    for (int rank = 0; rank < world_size_; ++rank) {
      if (rank == self_.rank) continue;
      if (self_.watch.pause_for(segment_.head(rank, n).number, n)) continue;
      if (!self_.watch.wait_slowly(line(rank).announced, n, rank, "to join")) return false;
    }
    return true;
  }
  void publish_reduced(std::uint32_t n) {
    line(self_.rank).reduced.set(n, kWakeAll, Scope::kProcesses);
  }
  bool wait_reduced(std::uint32_t n) {
    self_.sleep_in(Phase::kGather);
    for (int rank = 0; rank < world_size_; ++rank) {
      if (rank == self_.rank) continue;
      if (!self_.watch.wait(line(rank).reduced, n, rank, "to reduce its part")) return false;
    }
    return true;
  }
  bool agree(std::uint32_t n);

 protected:
  RankLine& line(int rank) const { return segment_.line(rank); }

  ProcessRank& self_;
  const Segment& segment_;
  const int world_size_;

 private:
  std::string mismatch(const CallRecord& own, int rank, const CallRecord& other) const;
};

inline bool StagedCounters::agree(std::uint32_t n) {
  const std::uint64_t parity = self_.sequence % 2;
  const CallRecord& own = line(self_.rank).calls[parity];
  bool layouts_differ = false;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (segment_.head(rank, n).call_digest == self_.call_digest) continue;
    const CallRecord& other = line(rank).calls[parity];
    if (!own.agrees(other)) {
      self_.watch.report(ErrorKind::kArgument, mismatch(own, rank, other));
      return false;
    }
    layouts_differ |= !own.has_same_layout(other);
  }
  self_.layouts_differ = layouts_differ;
  if (layouts_differ) return false;
  self_.sleep_in(Phase::kReduce);
  return true;
}

inline std::string StagedCounters::mismatch(const CallRecord& own, int rank,
                                            const CallRecord& other) const {
  const char* hint = own.text() == other.text() ? " (tensors of different sizes or dtypes)" : "";
  return join("ranks call different things: ", self_.watch.name_of(self_.rank), " ", own.text(),
              "; ", self_.watch.name_of(rank), " ", other.text(), hint);
}

// Reduces self.flat in place: in a direct call a slice of each piece per rank, else whole pieces.
template <class Memory>
class ReduceEngine : public Memory {
 public:
  ReduceEngine(const Memory& memory, bool is_direct, std::size_t piece_bytes)
      : Memory(memory), is_direct_(is_direct), piece_bytes_(piece_bytes) {
    self_.sources.resize(static_cast<std::size_t>(world_size_));
  }

  void copy_in(std::size_t piece, std::uint32_t n) {
    if (world_size_ == 1) return;
    auto copies = this->to_slot();
    const auto add = [&](Range range) {
      std::byte* to = own_slot(n) + (range.begin - piece * piece_bytes_);
      self_.flat.for_each_slice(range, [&](const FlatView::Slice& slice) {
        copies.add_copy(to + slice.offset, slice.data, slice.bytes, slice.dtype);
      });
    };
    if (!is_direct_) add(range_of(piece));
    for (int owner = 0; is_direct_ && owner < world_size_; ++owner) {
      if (owner != self_.rank) add(slice_of(range_of(piece), owner));
    }
    this->launch(copies);
  }
  void reduce(std::size_t piece, std::uint32_t n) {
    fold(piece, n, slice_of(range_of(piece), self_.rank), /*into_slot=*/true);
  }
  void combine(std::size_t piece, std::uint32_t n) {
    self_.sleep_in(Phase::kGather);
    fold(piece, n, range_of(piece), /*into_slot=*/false);
  }
  void copy_out(std::size_t piece, std::uint32_t n) {
    auto copies = this->from_slot();
    for (int owner = 0; owner < world_size_; ++owner) {
      if (owner == self_.rank) continue;
      const Range range = slice_of(range_of(piece), owner);
      const std::byte* from = slot(owner, n) + (range.begin - piece * piece_bytes_);
      self_.flat.for_each_slice(range, [&](const FlatView::Slice& slice) {
        copies.add_copy(slice.data, from + slice.offset, slice.bytes, slice.dtype);
      });
    }
    this->launch(copies);
  }

 private:
  using Memory::own_slot, Memory::self_, Memory::slice_of, Memory::slot, Memory::world_size_;

  Range range_of(std::size_t piece) const {
    const std::size_t begin = piece * piece_bytes_;
    return {begin, std::min(begin + piece_bytes_, self_.flat.bytes())};
  }
  // Return how many bytes ahead to prefetch: two pieces, as this and the next are in their slots.
  std::size_t ahead_of(std::size_t piece) const {
    const std::size_t ahead = 2 * piece_bytes_;
    const bool is_there = range_of(piece).end + ahead <= self_.flat.bytes();
    return is_there && self_.flat.bytes() >= kReadsAheadBytes ? ahead : 0;
  }

  void fold(std::size_t piece, std::uint32_t n, Range range, bool into_slot) {
    auto folds = into_slot ? this->folds(2, 0) : this->folds(1, ahead_of(piece));
    const std::size_t in_slot = range.begin - piece * piece_bytes_;
    std::vector<const void*>& sources = self_.sources;
    self_.flat.for_each_slice(range, [&](const FlatView::Slice& slice) {
      const std::size_t at = in_slot + slice.offset;
      for (int rank = 0; rank < world_size_; ++rank) {
        sources[static_cast<std::size_t>(rank)] =
            rank == self_.rank ? slice.data : slot(rank, n) + at;
      }
      const std::size_t numel = slice.bytes / item_bytes(slice.dtype);
      if (into_slot) {
        folds.add(slice.dtype, sources, {slice.data, own_slot(n) + at}, numel);
      } else {
        folds.add(slice.dtype, sources, {slice.data}, numel);
      }
    });
    this->launch(folds);
  }

  const bool is_direct_;
  const std::size_t piece_bytes_;
};

// Collectives other than all-reduce. A chunk is the data of one rank: the input of an all-gather or
// broadcast, the output of a reduce-scatter. Slots hold the same piece of each chunk.
template <class Memory>
class ChunkEngine : public Memory {
 public:
  ChunkEngine(const Memory& memory, const Collective& call, std::size_t slot_bytes)
      : Memory(memory),
        call_(call),
        is_scatter_(call.kind == CallKind::kReduceScatter),
        chunk_(is_scatter_ ? call.local_destination(0) : call.local_source(0)),
        piece_bytes_(slot_bytes / static_cast<std::size_t>(is_scatter_ ? world_size_ : 1) /
                     Memory::kChunkAlignment * Memory::kChunkAlignment) {}

  std::size_t num_pieces() const { return pieces_of(chunk_.bytes(), piece_bytes_); }

  void copy_in(std::size_t piece, std::uint32_t n) {
    auto copies = this->to_slot();
    if (is_scatter_) {
      for (int rank = 0; rank < world_size_; ++rank) {
        if (rank == self_.rank) continue;
        copies.add_copy(own_slot(n) + slot_offset(rank), input() + chunk_begin(rank) + begin(piece),
                        size(piece), chunk_.dtype);
      }
    } else if (call_.kind == CallKind::kAllGather || self_.rank == call_.root) {
      copies.add_copy(own_slot(n), input() + begin(piece), size(piece), chunk_.dtype);
    }
    this->launch(copies);
  }
  void combine(std::size_t piece, std::uint32_t n) {
    if (is_scatter_) return reduce_chunk(piece, n);
    auto copies = this->from_slot();
    if (call_.kind == CallKind::kAllGather) {
      for (int rank = 0; rank < world_size_; ++rank) {
        const std::byte* from = rank == self_.rank ? input() + begin(piece) : slot(rank, n);
        copies.add_copy(output() + chunk_begin(rank) + begin(piece), from, size(piece),
                        chunk_.dtype);
      }
    } else if (self_.rank != call_.root) {
      copies.add_copy(output() + begin(piece), slot(call_.root, n), size(piece), chunk_.dtype);
    }
    this->launch(copies);
  }

 private:
  using Memory::own_slot, Memory::self_, Memory::slot, Memory::world_size_;

  void reduce_chunk(std::size_t piece, std::uint32_t n) {
    std::vector<const void*> sources;
    for (int rank = 0; rank < world_size_; ++rank) {
      sources.push_back(rank == self_.rank ? input() + chunk_begin(rank) + begin(piece)
                                           : slot(rank, n) + slot_offset(self_.rank));
    }
    auto folds = this->folds(1, 0);
    folds.add(chunk_.dtype, sources, {output() + begin(piece)},
              size(piece) / item_bytes(chunk_.dtype));
    this->launch(folds);
  }
  std::byte* input() const { return call_.local_source(0).data; }
  std::byte* output() const { return call_.local_destination(0).data; }
  std::size_t begin(std::size_t piece) const { return piece * piece_bytes_; }
  std::size_t size(std::size_t piece) const {
    return std::min(piece_bytes_, chunk_.bytes() - begin(piece));
  }
  std::size_t chunk_begin(int rank) const {
    return static_cast<std::size_t>(rank) * chunk_.bytes();
  }
  std::size_t slot_offset(int rank) const { return static_cast<std::size_t>(rank) * piece_bytes_; }

  const Collective& call_;
  const bool is_scatter_;
  const TensorSpan chunk_;
  const std::size_t piece_bytes_;  // bytes of each chunk in one slot
};

template <class Memory>
class EmptyEngine : public Memory {
 public:
  explicit EmptyEngine(const Memory& memory) : Memory(memory) {}
  void copy_in(std::size_t, std::uint32_t) {}
  void combine(std::size_t, std::uint32_t) {}
};

}  // namespace pyringar
