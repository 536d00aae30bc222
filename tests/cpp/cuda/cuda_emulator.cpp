#include "cuda_emulator.h"

#include <chrono>
#include <deque>
#include <thread>

#include "check.h"

namespace pyringar::emulator {

namespace {

struct EmulatedBlock {
  explicit EmulatedBlock(unsigned num_threads) : barrier(num_threads) {}

  std::barrier<> barrier;
  BlockShared shared;
};

// Start all threads of a launch together, since their timeouts count from the start.
void run_at_once(stress::Random& random, const Launch& launch) {
  std::deque<EmulatedBlock> blocks;
  for (unsigned b = 0; b < launch.num_blocks; ++b) blocks.emplace_back(launch.num_threads);
  std::barrier<> start(static_cast<std::ptrdiff_t>(launch.num_blocks) * launch.num_threads);
  std::vector<std::thread> threads;
  for (unsigned b = 0; b < launch.num_blocks; ++b) {
    for (unsigned t = 0; t < launch.num_threads; ++t) {
      threads.emplace_back([&, b, t, own = random.fork()]() mutable {
        here = {
            t,   launch.num_threads, b, launch.num_blocks, &blocks[b].shared, &blocks[b].barrier,
            &own};
        here.device = launch.device;
        start.arrive_and_wait();
        launch.kernel();
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace

void run_sequentially(const Launch& launch) {
  for (unsigned b = 0; b < launch.num_blocks; ++b) {
    for (unsigned t = 0; t < launch.num_threads; ++t) {
      here = {t, launch.num_threads, b, launch.num_blocks, nullptr, nullptr, nullptr};
      launch.kernel();
    }
  }
  here = {};
}

void run_streams(stress::Random& random, const std::vector<std::vector<Launch>>& streams) {
  std::vector<std::thread> threads;
  for (const std::vector<Launch>& stream : streams) {
    threads.emplace_back([&stream, own = random.fork()]() mutable {
      for (const Launch& launch : stream) {
        stress::dawdle(own);
        run_at_once(own, launch);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void wait_for_block() {
  if (here.scheduler != nullptr) {
    here.scheduler->wait_for_block();
    here.has_fenced = false;
    return;
  }
  CHECK(here.barrier != nullptr, "a barrier in a kernel that was launched as one without");
  stress::dawdle(*here.random);
  here.barrier->arrive_and_wait();
  here.has_fenced = false;
}

void check_scope(const std::uint32_t* flag, bool is_system) {
  // Relaxed, so that this bookkeeping does not order the accesses under test.
  auto* users = const_cast<std::uint32_t*>(flag) + 2;
  const std::uint32_t own = 1u << here.device;
  const std::uint32_t all = __atomic_or_fetch(users, own, __ATOMIC_RELAXED);
  const std::uint32_t near = is_system ? __atomic_load_n(users + 1, __ATOMIC_RELAXED)
                                       : __atomic_or_fetch(users + 1, own, __ATOMIC_RELAXED);
  CHECK(near == 0 || near == all, "a flag between devices is ordered on one of them only");
}

void pause_a_little() {
  if (here.scheduler != nullptr) return here.scheduler->pause();
  std::this_thread::yield();
}

std::uint64_t now_ns() {
  if (here.scheduler != nullptr) return here.scheduler->now_ns();
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() /
                                    std::chrono::nanoseconds(1));
}

}  // namespace pyringar::emulator
