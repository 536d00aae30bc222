// staged_counters: what every staged engine of a process does alike: counters, and the comparison
// of calls.
//
// Contract  the counters and waits of core/staged_program.h, on the rank's line of the segment.
//           What an engine's memory needs beyond them (the counters of a GPU) is the engine's.
// Threads   a group runs one call at a time.
// Tests     tests/conformance/test_bits.py
#pragma once

#include <cstdint>
#include <string>

#include "process/call.h"

namespace pyringar {

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

}  // namespace pyringar
