// thread: which cores there are, and on which of them a group's threads run.
//
// Contract  The kernel often wakes a thread on the waker's own core, behind the thread that waits
//           for it. Affinity keeps helpers off the caller's core, and spreads ranks over the cores
//           that the caller may use. When the caller has moved or may use other cores than before,
//           this costs a system call per thread.
// Threads   one at a time per Affinity (its owner holds a lock).
// Tests     tests/cpp/stress.cpp
#pragma once

#include <bitset>
#include <cstddef>
#include <span>
#include <thread>
#include <vector>

namespace pyringar {

using CoreSet = std::bitset<1024>;  // by number

// Cores that this thread, and threads that it starts, may use now; 1 at least. If OpenMP binds its
// threads, and so this one: the cores of all threads of the process.
CoreSet allowed_cores();

class Affinity {
 public:
  // Looks which cores the caller may use now, and returns how many.
  int update_cores();
  // Helpers may run anywhere but where the caller runs now.
  void keep_off_caller(std::span<std::thread> helpers);
  // Ranks 1, 2, ... go to the cores after the caller's, neighbours to one core where there are more
  // ranks than cores: most of what they exchange is with their neighbours.
  void spread_from_caller(std::span<std::thread> ranks);

 private:
  bool are_placed(std::size_t num_threads);

  CoreSet own_{};           // of the calling thread, at the last look
  std::vector<int> cores_;  // what follows from that, ascending
  int caller_core_ = -1;    // around which they were placed
  std::size_t num_placed_ = 0;
};

}  // namespace pyringar
