// process: identity of a process, liveness, fork detection, and the core of a thread.
// Contract  The kernel reuses process ids. A ProcessId therefore holds the start time too. A zombie
//           (ended, but not waited for) counts as dead.
// Tests     tests/conformance/test_bits.py, tests/test_process_deaths.py
#pragma once

#include <cstdint>
#include <string>

#include "core/error.h"

namespace pyringar {

struct ProcessId {
  std::int32_t pid = 0;
  std::uint64_t start_ticks = 0;  // start time in ticks since boot; 0: unknown
};

ProcessId this_process();
bool is_alive(const ProcessId& process);
std::string host_name();

// Return a number that changes in a forked child, if the parent called this before fork().
std::uint32_t fork_generation();

class ForkGuard {
 public:
  bool forked() const { return fork_generation() != generation_; }
  void check_not_forked() const {
    if (forked()) fail_forked();
  }

 private:
  const std::uint32_t generation_ = fork_generation();
};

// Return true if this process was forked and has not called exec() since.
bool is_forked_process();

int current_core();

// Move the calling thread to another core that its affinity mask allows, if there is one.
void move_off_core(int core);

}  // namespace pyringar
