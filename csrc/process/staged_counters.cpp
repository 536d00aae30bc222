// staged_counters: see the header.
//
// Tests     tests/conformance/test_bits.py

#include "process/staged_counters.h"

#include "core/error.h"

namespace pyringar {

bool StagedCounters::agree(std::uint32_t n) {
  const std::uint64_t parity = self_.sequence % 2;
  const CallRecord& own = line(self_.rank).calls[parity];
  bool lies_otherwise = false;
  for (int rank = 0; rank < world_size_; ++rank) {
    if (segment_.head(rank, n).call_digest == self_.call_digest) continue;
    const CallRecord& other = line(rank).calls[parity];
    if (!own.agrees(other)) {
      self_.watch.report(ErrorKind::kArgument, mismatch(own, rank, other));
      return false;
    }
    lies_otherwise |= !own.lies_like(other);
  }
  self_.lies_otherwise = lies_otherwise;
  if (lies_otherwise) return false;
  self_.sleep_in(Phase::kReduce);
  return true;
}

std::string StagedCounters::mismatch(const CallRecord& own, int rank,
                                     const CallRecord& other) const {
  const char* hint = own.text() == other.text() ? " (tensors of different sizes or dtypes)" : "";
  return join("ranks call different things: ", self_.watch.name_of(self_.rank), " ", own.text(),
              "; ", self_.watch.name_of(rank), " ", other.text(), hint);
}

}  // namespace pyringar
