// thread: reads and sets the affinity masks of threads.
#include "os/thread.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

#if defined(__linux__)
#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#endif

namespace pyringar {

#if defined(__linux__)

namespace {

// If a cgroup forbids the change, the thread stays on its cores: slower, but correct.
void run_on(std::thread& thread, const cpu_set_t& cores) {
  static_cast<void>(pthread_setaffinity_np(thread.native_handle(), sizeof cores, &cores));
}

// Return the affinity mask of a thread; id 0 is the caller. Empty if there is no such thread, or if
// the machine has more cores than a CoreSet holds.
CoreSet cores_of_thread(int id) {
  static_assert(sizeof(cpu_set_t) == sizeof(CoreSet));
  CoreSet cores;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(id, sizeof allowed, &allowed) == 0) {
    std::memcpy(static_cast<void*>(&cores), &allowed, sizeof allowed);
  }
  return cores;
}

bool is_bound_by_openmp() {
  const auto value_of = [](const char* name) {
    const char* value = std::getenv(name);
    return std::string_view(value != nullptr ? value : "");
  };
  const std::string_view bind = value_of("OMP_PROC_BIND");
  if (!bind.empty()) return bind != "false" && bind != "FALSE";
  return !value_of("OMP_PLACES").empty() || !value_of("GOMP_CPU_AFFINITY").empty() ||
         !value_of("KMP_AFFINITY").empty();
}

CoreSet cores_of_process() {
  CoreSet cores;
  DIR* tasks = opendir("/proc/self/task");
  if (tasks == nullptr) return cores;
  while (const dirent* task = readdir(tasks)) {  // "." gives id 0: the caller
    cores |= cores_of_thread(std::atoi(task->d_name));
  }
  closedir(tasks);
  return cores;
}

CoreSet usable_cores(CoreSet own) {
  static const bool is_bound = is_bound_by_openmp();
  if (is_bound) own |= cores_of_process();
  if (own.none()) own.set(0);
  return own;
}

}  // namespace

CoreSet allowed_cores() { return usable_cores(cores_of_thread(0)); }

int Affinity::update_cores() {
  const CoreSet own = cores_of_thread(0);
  if (cores_.empty() || own != own_) {
    own_ = own;
    caller_core_ = -1;
    cores_.clear();
    const CoreSet usable = usable_cores(own);
    for (std::size_t core = 0; core < usable.size(); ++core) {
      if (usable[core]) cores_.push_back(static_cast<int>(core));
    }
  }
  return static_cast<int>(cores_.size());
}

bool Affinity::are_placed(std::size_t num_threads) {
  const int core = sched_getcpu();
  const bool has_moved =
      core != caller_core_ && std::binary_search(cores_.begin(), cores_.end(), core);
  if (!has_moved && caller_core_ >= 0 && num_placed_ == num_threads) return true;
  caller_core_ = core;
  num_placed_ = num_threads;
  return false;
}

void Affinity::keep_off_caller(std::span<std::thread> helpers) {
  if (are_placed(helpers.size())) return;
  cpu_set_t others;
  CPU_ZERO(&others);
  for (const int core : cores_) {
    if (core != caller_core_ || cores_.size() == 1) CPU_SET(static_cast<unsigned>(core), &others);
  }
  for (std::thread& helper : helpers) run_on(helper, others);
}

void Affinity::spread_from_caller(std::span<std::thread> ranks) {
  if (are_placed(ranks.size())) return;
  const auto found = std::lower_bound(cores_.begin(), cores_.end(), caller_core_);
  const auto place = static_cast<std::size_t>(found - cores_.begin());
  const std::size_t world_size = ranks.size() + 1;
  const std::size_t used = std::min(world_size, cores_.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const std::size_t step = (i + 1) * used / world_size;
    const int core = cores_[(place + step) % cores_.size()];
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(static_cast<unsigned>(core), &one);
    run_on(ranks[i], one);
  }
}

#else

CoreSet allowed_cores() {
  CoreSet cores;
  const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1u, 1024u);
  for (unsigned core = 0; core < count; ++core) cores.set(core);
  return cores;
}

int Affinity::update_cores() {
  static const int count = static_cast<int>(allowed_cores().count());
  return count;
}
void Affinity::keep_off_caller(std::span<std::thread>) {}
void Affinity::spread_from_caller(std::span<std::thread>) {}

#endif

}  // namespace pyringar
