// torch_team: looks up symbols of loaded libraries, and runs one parallel region.
#include "os/torch_team.h"

#if defined(__linux__) && !defined(__SANITIZE_THREAD__)
#define PYRINGAR_JOINS_TORCH 1
#endif
#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#undef PYRINGAR_JOINS_TORCH
#endif
#endif

#if defined(PYRINGAR_JOINS_TORCH)

#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <exception>
#include <mutex>
#include <optional>
#include <string>

#include "os/float_mode.h"
#include "os/process.h"

namespace pyringar::torch_team {

namespace {

struct Runtime {
  int (*torch_threads)() = nullptr;
  void (*parallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags) = nullptr;
  int (*thread_num)() = nullptr;
  int (*team_size)() = nullptr;
  int (*max_threads)() = nullptr;
  int (*thread_limit)() = nullptr;
  int (*in_parallel)() = nullptr;
};

template <typename Function>
bool find(void* where, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(where, name));
  return *function != nullptr;
}

std::string library_of(void* symbol) {
  Dl_info info{};
  const bool is_known = symbol != nullptr && dladdr(symbol, &info) != 0;
  return is_known && info.dli_fname != nullptr ? info.dli_fname : "";
}

// Return the OpenMP library that torch calls, or null if there is none or there are two. Global
// symbols (LD_PRELOAD) come before torch's dependencies. All runtimes define GOMP_parallel.
void* find_openmp(void* torch) {
  void* parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
  if (parallel == nullptr) parallel = dlsym(torch, "GOMP_parallel");
  const std::string path = library_of(parallel);
  const std::string llvm = library_of(dlsym(torch, "__kmpc_fork_call"));
  if (path.empty() || (!llvm.empty() && llvm != path)) return nullptr;
  return dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
}

Runtime look_for_runtime(void* torch) {
  Runtime found;
  if (!find(torch, "_ZN2at15get_num_threadsEv", &found.torch_threads)) return found;
  void* library = find_openmp(torch);
  const bool is_whole = library != nullptr &&
                        find(library, "omp_get_thread_num", &found.thread_num) &&
                        find(library, "omp_get_num_threads", &found.team_size) &&
                        find(library, "omp_get_max_threads", &found.max_threads) &&
                        find(library, "omp_get_thread_limit", &found.thread_limit) &&
                        find(library, "omp_in_parallel", &found.in_parallel);
  if (is_whole) find(library, "GOMP_parallel", &found.parallel);
  return found;
}

// Look up torch's symbols once, in the first call after torch is loaded. Until then: none.
const Runtime& runtime() {
  static const Runtime no_torch;
  static std::atomic<void*> torch{nullptr};
  if (torch.load(std::memory_order_acquire) == nullptr) {
    void* loaded = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (loaded == nullptr) return no_torch;
    torch.store(loaded, std::memory_order_release);
  }
  static const Runtime found = look_for_runtime(torch.load(std::memory_order_acquire));
  return found;
}

bool is_forked() {
  static const ForkGuard process;
  static const bool was_forked = is_forked_process();
  return was_forked || process.forked();
}

std::atomic<bool> is_taken{false};

// CPU clock of thread 1 in this thread's team; empty before the first region.
thread_local std::optional<clockid_t> worker_clock;

// Return true if the team's thread 1 spins: its CPU clock then advances between two reads. A thread
// that sleeps or waits for a core uses no time. Also true if it was replaced and its clock is gone.
bool is_awake() {
  timespec before{};
  timespec after{};
  if (!worker_clock || clock_gettime(*worker_clock, &before) != 0 ||
      clock_gettime(*worker_clock, &after) != 0) {
    return true;
  }
  return before.tv_nsec != after.tv_nsec || before.tv_sec != after.tv_sec;
}

struct Region {
  const std::function<void(int, int)>& work;
  const Runtime& runtime;
  std::optional<clockid_t> worker_clock{};
  std::mutex mutex{};
  std::exception_ptr error{};

  // noexcept: OpenMP cannot unwind exceptions.
  static void body(void* data) noexcept {
    auto& region = *static_cast<Region*>(data);
    const int thread = region.runtime.thread_num();
    clockid_t clock{};
    if (thread == 1 && pthread_getcpuclockid(pthread_self(), &clock) == 0) {
      region.worker_clock = clock;
    }
    try {
      const DefaultFloatMode mode;
      region.work(thread, region.runtime.team_size());
    } catch (...) {
      const std::lock_guard<std::mutex> lock(region.mutex);
      if (!region.error) region.error = std::current_exception();
    }
  }
};

}  // namespace

int num_threads() {
  const Runtime& found = runtime();
  if (found.torch_threads == nullptr) return 0;
  const bool is_inside = found.in_parallel != nullptr && found.in_parallel() != 0;
  if (is_inside) return 1;
  const int limit = found.thread_limit == nullptr ? INT_MAX : found.thread_limit();
  return std::min(found.torch_threads(), limit);
}

// If torch and OpenMP disagree about the number of threads, torch uses another thread pool.
bool is_ready() {
  const Runtime& found = runtime();
  if (found.parallel == nullptr || is_forked() || found.in_parallel() != 0) return false;
  return num_threads() > 1 && found.torch_threads() == found.max_threads() && is_awake();
}

bool try_run(const std::function<void(int thread, int num_threads)>& work) {
  if (is_taken.exchange(true, std::memory_order_acquire)) return false;
  Region region{work, runtime()};
  region.runtime.parallel(&Region::body, &region, 0, 0);
  worker_clock = region.worker_clock;
  is_taken.store(false, std::memory_order_release);
  if (region.error) std::rethrow_exception(region.error);
  return true;
}

}  // namespace pyringar::torch_team

#else

namespace pyringar::torch_team {

int num_threads() { return 0; }
bool is_ready() { return false; }
bool try_run(const std::function<void(int, int)>&) { return false; }

}  // namespace pyringar::torch_team

#endif
