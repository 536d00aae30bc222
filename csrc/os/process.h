// process: which process this is, and whether another one still lives.
//
// Contract  a process id names another process once the first is gone; with the time at which it
//           started it does not. One that has ended and was not waited for yet (a zombie) is gone.
// Tests     tests/conformance/test_bits.py, tests/test_process_deaths.py
#pragma once

#include <cstdint>
#include <string>

#include "core/error.h"

namespace pyringar {

struct ProcessId {
  std::int32_t pid = 0;
  std::uint64_t start_ticks = 0;  // since boot; 0: not known
};

ProcessId this_process();
bool is_alive(const ProcessId& process);
std::string host_name();

// Another number in a forked child than in its parent, once both or the parent have asked.
std::uint32_t fork_generation();

// Remembers the process that made it: a forked child is another one.
class ForkGuard {
 public:
  bool forked() const { return fork_generation() != generation_; }
  void check_not_forked() const {
    if (forked()) fail_forked();
  }

 private:
  const std::uint32_t generation_ = fork_generation();
};

// Whether this process was forked, also before this library was loaded, with no exec since.
bool is_forked_process();

int current_core();

// Has this thread run on another core than this one, if it may.
void move_off_core(int core);

}  // namespace pyringar
