// os_thread: affinity masks.
//
// Floor     cpu
// Tests     tests/cpp/stress.cpp

#include "cpu/os_thread.h"

#include <algorithm>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace pyringar {

#if defined(__linux__)

namespace {

// A core can have gone away since, or a cgroup may forbid it: then the thread stays where it is,
// which is slower and nothing else.
void run_on(std::thread& thread, const cpu_set_t& cores) {
  static_cast<void>(pthread_setaffinity_np(thread.native_handle(), sizeof cores, &cores));
}

}  // namespace

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(static_cast<unsigned>(core), &allowed)) cores.push_back(core);
    }
  }
  if (cores.empty()) cores.push_back(0);
  return cores;
}

int Places::new_place_of_caller() {
  const int core = sched_getcpu();
  if (core == caller_core_ || cores_.size() < 2) return -1;
  const auto found = std::find(cores_.begin(), cores_.end(), core);
  if (found == cores_.end()) return -1;
  caller_core_ = core;
  return static_cast<int>(found - cores_.begin());
}

void Places::keep_off_caller(std::span<std::thread> helpers) {
  const int place = new_place_of_caller();
  if (place < 0) return;
  cpu_set_t others;
  CPU_ZERO(&others);
  for (const int core : cores_) {
    if (core != caller_core_) CPU_SET(static_cast<unsigned>(core), &others);
  }
  for (std::thread& helper : helpers) run_on(helper, others);
}

void Places::spread_from_caller(std::span<std::thread> ranks) {
  const int place = new_place_of_caller();
  if (place < 0) return;
  const std::size_t world_size = ranks.size() + 1;
  const std::size_t used = std::min(world_size, cores_.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const std::size_t step = (i + 1) * used / world_size;
    const int core = cores_[(static_cast<std::size_t>(place) + step) % cores_.size()];
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<unsigned>(core), &one);
    run_on(ranks[i], one);
  }
}

#else

std::vector<int> allowed_cores() {
  return std::vector<int>(std::max(1u, std::thread::hardware_concurrency()));
}

int Places::new_place_of_caller() { return -1; }
void Places::keep_off_caller(std::span<std::thread>) {}
void Places::spread_from_caller(std::span<std::thread>) {}

#endif

}  // namespace pyringar
