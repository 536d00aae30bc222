// team_test: os/torch_team on a stand-in for torch, with two threads of a real OpenMP runtime.
//
//   team_test PATH         PATH: the stand-in with OpenMP; everything that a team promises
//   team_test PATH alone   another stand-in: nobody joins
//
// Build     tests/test_torch_team.py
// Output    the first failed check ends it with status 1.

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <new>
#include <thread>

#include "os/float_mode.h"
#include "os/torch_team.h"

namespace pyringar {

namespace {

constexpr int kThreads = 2;  // no more than cores: OpenMP's threads spin for less time then

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::_Exit(1);                                                       \
    }                                                                      \
  } while (false)

struct Torch {
  void* library;
  void (*operate)();
  void (*set_threads)(int);
};

void* load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::fprintf(stderr, "%s\n", dlerror());
  CHECK(library != nullptr);
  return library;
}

// The machine may be busy, and the team's threads not on a core just now.
void wait_until_ready(const Torch& torch) {
  for (int i = 0; i < 20'000; ++i) {
    torch.operate();
    if (torch_team::is_ready()) return;
    usleep(100);
  }
  CHECK(!"the team never got ready");
}

void run(const Torch& torch, const std::function<void(int, int)>& work) {
  wait_until_ready(torch);
  CHECK(torch_team::try_run(work));
}

void every_thread_works_once(const Torch& torch) {
  std::array<std::atomic<int>, kThreads> calls{};
  std::array<std::thread::id, kThreads> ids{};
  run(torch, [&](int thread, int num_threads) {
    CHECK(thread >= 0 && thread < num_threads && num_threads == kThreads);
    const auto i = static_cast<std::size_t>(thread);
    calls[i].fetch_add(1);
    ids[i] = std::this_thread::get_id();
  });
  for (const auto& count : calls) CHECK(count == 1);
  CHECK(ids[0] == std::this_thread::get_id());
  CHECK(ids[0] != ids[1]);
}

void one_error_comes_out(const Torch& torch) {
  for (const int thrower : {0, 1, -1}) {
    std::atomic<int> calls{0};
    bool has_thrown = false;
    try {
      run(torch, [&](int thread, int) {
        calls.fetch_add(1);
        if (thread == thrower || thrower < 0) throw std::bad_alloc();
      });
    } catch (const std::bad_alloc&) {
      has_thrown = true;
    }
    CHECK(has_thrown && calls == kThreads);
  }
  every_thread_works_once(torch);
}

void nobody_joins_twice(const Torch& torch) {
  std::atomic<int> others{0};
  run(torch, [&](int thread, int) {
    CHECK(torch_team::num_threads() == 1);
    CHECK(!torch_team::is_ready());
    if (thread != 0) return;
    std::thread([&] {
      others += torch_team::try_run([&](int, int) { others += 10; }) ? 1 : 0;
    }).join();
  });
  CHECK(others == 0);
  CHECK(torch_team::num_threads() == kThreads);
}

// The team's threads began while the caller flushed denormals, and do so themselves.
void all_compute_in_the_default_mode(const Torch& torch) {
  std::atomic<int> kept{0};
  run(torch, [&](int, int) {
    volatile float tiny = std::numeric_limits<float>::denorm_min();
    kept += tiny * 2.0f > 0 ? 1 : 0;
  });
  CHECK(kept == kThreads);
}

void threads_that_sleep_are_left_alone(const Torch& torch) {
  run(torch, [](int, int) {});
  for (int i = 0; i < 100 && torch_team::is_ready(); ++i) usleep(20'000);
  CHECK(!torch_team::is_ready());
  wait_until_ready(torch);
}

void another_number_of_threads(const Torch& torch) {
  torch.set_threads(1);
  CHECK(torch_team::num_threads() == 1);
  CHECK(!torch_team::is_ready());
  torch.set_threads(kThreads);
  CHECK(torch_team::num_threads() == kThreads);
  every_thread_works_once(torch);
}

void a_child_joins_nobody(const Torch& torch) {
  run(torch, [](int, int) {});
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    CHECK(!torch_team::is_ready());
    std::_Exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  every_thread_works_once(torch);
}

void flush_denormals() {
#if defined(__SSE__)
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8040);
#endif
}

int test(int argc, char** argv) {
  CHECK(argc > 1);
  CHECK(torch_team::num_threads() == 0 && !torch_team::is_ready());
  void* library = load(argv[1]);
  if (argc > 2) {
    CHECK(!torch_team::is_ready());
    return 0;
  }
  const Torch torch = {library, reinterpret_cast<void (*)()>(dlsym(library, "operate")),
                       reinterpret_cast<void (*)(int)>(dlsym(library, "set_threads"))};
  CHECK(torch.operate != nullptr && torch.set_threads != nullptr);
  torch.set_threads(kThreads);
  flush_denormals();
  torch.operate();
  all_compute_in_the_default_mode(torch);
  every_thread_works_once(torch);
  one_error_comes_out(torch);
  nobody_joins_twice(torch);
  another_number_of_threads(torch);
  threads_that_sleep_are_left_alone(torch);
  a_child_joins_nobody(torch);
  return 0;
}

}  // namespace

}  // namespace pyringar

int main(int argc, char** argv) { return pyringar::test(argc, argv); }
