// death_notice: one line on stderr that names a dead rank, before torchrun ends this process.
//
// torchrun sends SIGTERM to all ranks within 0.1 s of a rank's death. That is often before a call
// of another rank notices the death and raises its error.
//
// Contract  Does nothing unless torchrun started this process (it sets TORCHELASTIC_ERROR_FILE) and
//           SIGTERM has its default action. Then SIGTERM writes the line and ends the process. One
//           rank of a group names the dead rank. A rank that SIGTERM ends counts as having left.
// Threads   the handler may run in any thread, at any line: it takes no lock and no memory.
// Tests     tests/test_distributed_deaths.py
#pragma once

#include "process/segment.h"

namespace pyringar {

class DeathNotice {
 public:
  DeathNotice(const Segment& segment, int rank);
  ~DeathNotice();
  DeathNotice(const DeathNotice&) = delete;
  DeathNotice& operator=(const DeathNotice&) = delete;

  bool is_own() const;      // false in a forked child, which is no rank
  bool write_line() const;  // false if all other ranks are alive or have left
  void leave() const { segment_.line(rank_).state.store(RankState::kLeft); }

 private:
  const Segment& segment_;
  const int rank_;
  const int pid_;
};

}  // namespace pyringar
