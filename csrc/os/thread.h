// thread: the cores of this process, and the cores on which a group's threads run.
// Contract  The kernel often wakes a thread on the core of the thread that wakes it, where it must
//           wait. Affinity keeps helpers off the caller's core, and spreads ranks over the caller's
//           cores. If the caller moved or its mask changed, this costs a system call per thread.
// Threads   One thread at a time per Affinity: its owner holds a lock.
// Tests     tests/test_affinity.py, tests/cpp/pool_test.cpp
#pragma once

#include <bitset>
#include <cstddef>
#include <span>
#include <thread>
#include <vector>

namespace pyringar {

using CoreSet = std::bitset<1024>;  // indexed by core number

// Return the cores that the caller and the threads it starts may use, at least one. If OpenMP binds
// threads to cores, return the cores of all threads of the process.
CoreSet allowed_cores();

class Affinity {
 public:
  // Read which cores the caller may use now; return their number.
  int update_cores();
  // Keep helpers off the core on which the caller runs now.
  void keep_off_caller(std::span<std::thread> helpers);
  // Bind ranks 1, 2, ... to the cores after the caller's core. If ranks outnumber cores, neighbors
  // share a core, since they exchange most data.
  void spread_from_caller(std::span<std::thread> ranks);

 private:
  bool are_placed(std::size_t num_threads);

  CoreSet own_{};           // affinity mask of the caller at the last update
  std::vector<int> cores_;  // usable cores, ascending
  int caller_core_ = -1;    // core of the caller at the last placement
  std::size_t num_placed_ = 0;
};

}  // namespace pyringar
