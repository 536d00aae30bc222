// rank_team: one thread per rank, for algorithms in which ranks wait for each other.
// Contract  run(program) calls program(rank) for all ranks at the same time, rank 0 on the caller's
//           thread, and returns when all have returned. If OpenMP gives enough threads, it uses
//           torch's team, which would otherwise spin on the ranks' cores. Programs wait only
//           through Watch, which ends waits if no rank progresses for the timeout. A program that
//           throws ends the process, since the links' counters would no longer agree.
// Threads   One run() at a time per team. Threads start at first use; the destructor joins them.
// Tests     tests/cpp/ring_test.cpp, tests/cpp/group_test.cpp
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/ring_program.h"
#include "os/stillness.h"
#include "os/thread.h"
#include "os/torch_team.h"
#include "os/wait.h"

namespace pyringar {

// The waits of one collective, with a timeout. After one timeout all ranks give up, and failure()
// describes the wait for the lowest message number, which blocked all other waits.
class Watch {
 public:
  Watch(int world_size, std::chrono::nanoseconds timeout)
      : timeout_(timeout), moves_(static_cast<std::size_t>(world_size)) {}

  void progressed(int rank) {
    std::atomic<std::uint64_t>& count = moves_[static_cast<std::size_t>(rank)].count;
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  // Wait, as `rank`, for the counter of another rank. Return false on timeout. describe() makes the
  // failure text; the text with the lowest message number is kept.
  template <typename Describe>
  bool wait(int rank, Flag& flag, std::uint32_t wanted, std::uint32_t message,
            Describe&& describe) {
    if (try_for_flag(flag, wanted) || nap(rank, flag, wanted)) {
      progressed(rank);
      return true;
    }
    report(message, describe());
    return false;
  }

  // Return "CALL over 4 ranks: rank 0 waited 30 s for rank 3 WHAT".
  std::string late(const std::string& call, int rank, int peer, const std::string& what) const {
    return join(call, " over ", moves_.size(), " ranks: rank ", rank, " waited ",
                std::chrono::duration<double>(timeout_).count(), " s for rank ", peer, " ", what);
  }

  std::string failure() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

 private:
  struct alignas(64) Moves {
    std::atomic<std::uint64_t> count{0};
  };

  bool nap(int rank, Flag& flag, std::uint32_t wanted);

  void report(std::uint32_t message, std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty() || !reached(message, failed_message_)) {
      failure_ = std::move(text);
      failed_message_ = message;
    }
    given_up_.store(1, std::memory_order_release);
  }

  const std::chrono::nanoseconds timeout_;
  std::vector<Moves> moves_;
  std::atomic<std::uint32_t> given_up_{0};
  std::mutex mutex_;
  std::string failure_;
  std::uint32_t failed_message_ = 0;
};

class RankTeam {
 public:
  explicit RankTeam(int world_size) : world_size_(world_size) {}
  ~RankTeam();

  void run(const std::function<void(int rank)>& program, CallMode mode);

 private:
  bool run_in_torch_team(const std::function<void(int rank)>& program);
  void run_in_own_threads(const std::function<void(int rank)>& program);
  void start_threads(std::uint32_t seen);
  void serve(int rank, std::uint32_t seen);

  const int world_size_;
  std::vector<std::thread> threads_;
  Affinity affinity_;
  const std::function<void(int)>* program_ = nullptr;
  Flag started_;  // number of runs started
  std::vector<Flag> finished_ = std::vector<Flag>(static_cast<std::size_t>(world_size_));
  std::atomic<std::uint32_t> stop_{0};
};

}  // namespace pyringar
