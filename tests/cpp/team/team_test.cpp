// team_test: os/torch_team with a stand-in for torch, and two threads of a real OpenMP runtime.
//
//   team_test PATH         PATH: the library that stands in for torch
//   team_test PATH alone   the stand-in is incomplete: the team must stay unused
//
// Build     tests/test_torch_team.py, which also tests bits, forks and denormals
// Output    The first failed check ends the program with status 1.

#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <thread>

#include "os/torch_team.h"

namespace pyringar {

namespace {

constexpr int kThreads = 2;  // OpenMP threads spin shorter if there are more of them than cores

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
};

void* load(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) std::fprintf(stderr, "%s\n", dlerror());
  CHECK(library != nullptr);
  return library;
}

// Wait until the team's threads run: on a busy machine they may not have a core.
void wait_until_ready(const Torch& torch) {
  for (int i = 0; i < 20'000; ++i) {
    torch.operate();
    if (torch_team::is_ready()) return;
    usleep(100);
  }
  CHECK(!"the team is never ready");
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

void run_throws_one_error(const Torch& torch) {
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

void team_is_exclusive(const Torch& torch) {
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

}  // namespace

}  // namespace pyringar

int main(int argc, char** argv) {
  using namespace pyringar;
  void* library = load(argv[1]);
  if (argc > 2) {
    CHECK(!torch_team::is_ready());
    return 0;
  }
  const Torch torch = {library, reinterpret_cast<void (*)()>(dlsym(library, "operate"))};
  CHECK(torch.operate != nullptr);
  every_thread_works_once(torch);
  run_throws_one_error(torch);
  team_is_exclusive(torch);
  return 0;
}
