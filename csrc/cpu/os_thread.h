// os_thread: which cores there are, and on which of them a group's threads run.
//
// Floor     cpu: std and the operating system (Linux; elsewhere threads run where they like).
// Contract  A thread that is woken is often put on the waker's own core, and stays there, behind
//           the very thread that waits for it. Places therefore keeps helpers off the core of the
//           calling thread, and spreads ranks over cores. It acts when the caller has moved, costs
//           a system call per thread then, and never leaves the cores that the process may use.
// Threads   one at a time per Places (its owner holds a lock).
// Tests     tests/cpp/stress.cpp
#pragma once

#include <span>
#include <thread>
#include <vector>

namespace pyringar {

// Cores this thread may run on, 1 at least.
std::vector<int> allowed_cores();

class Places {
 public:
  // Helpers may run anywhere but where the caller runs now.
  void keep_off_caller(std::span<std::thread> helpers);
  // Ranks 1, 2, ... go to the cores after the caller's, neighbours to one core where there are more
  // ranks than cores: most of what they exchange is with their neighbours.
  void spread_from_caller(std::span<std::thread> ranks);

 private:
  // The position of the caller's core among cores_, or -1: not moved, or nothing to do.
  int new_place_of_caller();

  const std::vector<int> cores_ = allowed_cores();
  int caller_core_ = -1;
};

}  // namespace pyringar
