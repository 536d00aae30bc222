// rank_team: one native thread per rank, for the algorithms in which ranks wait for each other.
//
// Floor     cpu
// Contract  run(program) calls program(rank) for every rank at the same time, rank 0 on the
//           caller's thread, and returns when all have returned. Programs wait only with deadlines,
//           so run() ends. The first rank that is late makes the others give up; of all their
//           failures the one that names the culprit is kept.
// Threads   one run() at a time per team (its owner holds a lock). Threads start at first use and
//           are joined by the destructor.
// Tests     tests/cpp/stress.cpp, tests/test_ring.py
#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/ring_program.h"
#include "cpu/os_thread.h"
#include "cpu/os_wait.h"

namespace pyringar {

// What ranks of one collective share besides data: a deadline, and the failure that explains the
// others. A rank that does not come makes its next wait, and that one's next, all until the same
// deadline; who waits for the earliest turn waits for the culprit.
class Watch {
 public:
  explicit Watch(std::chrono::nanoseconds timeout) : timeout_(timeout) {}

  std::chrono::nanoseconds timeout() const { return timeout_; }
  void start() { deadline_ = Clock::now() + timeout_; }

  // Waits for a counter of another rank. turn: which message or barrier this rank is at, a counter
  // that all ranks share. Late, or somebody else is: describe() is kept if no turn is earlier.
  template <typename Describe>
  bool wait(Flag& flag, std::uint32_t wanted, std::uint32_t turn, Describe&& describe) {
    if (wait_for_flag(flag, wanted, deadline_, &given_up_)) return true;
    report(turn, describe());
    return false;
  }

  // Once all ranks have returned.
  std::string failure() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
  }

 private:
  void report(std::uint32_t turn, std::string text) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty() || !reached(turn, failed_turn_)) {
      failure_ = std::move(text);
      failed_turn_ = turn;
    }
    given_up_.store(1, std::memory_order_release);
  }

  const std::chrono::nanoseconds timeout_;
  Deadline deadline_{};
  std::atomic<std::uint32_t> given_up_{0};
  std::mutex mutex_;
  std::string failure_;
  std::uint32_t failed_turn_ = 0;
};

class RankTeam {
 public:
  explicit RankTeam(int world_size) : world_size_(world_size) {}
  ~RankTeam();
  RankTeam(const RankTeam&) = delete;
  RankTeam& operator=(const RankTeam&) = delete;

  int world_size() const { return world_size_; }
  void run(const std::function<void(int rank)>& program);

 private:
  void start_threads(std::uint32_t seen);
  void serve(int rank, std::uint32_t seen);

  const int world_size_;
  std::vector<std::thread> threads_;
  Places places_;
  const std::function<void(int)>* program_ = nullptr;
  Flag started_;  // one tick per run
  std::vector<Flag> finished_ = std::vector<Flag>(static_cast<std::size_t>(world_size_));
  std::atomic<std::uint32_t> stop_{0};
};

}  // namespace pyringar
