// rank_team: one native thread per rank, for the algorithms in which ranks wait for each other.
//
// Contract  run(program) calls program(rank) for every rank at the same time, rank 0 on the
//           caller's thread, and returns when all have returned. Where OpenMP gives enough of them
//           the threads are torch's, which would otherwise spin on the ranks' cores. Programs wait
//           only through Watch, whose waits end when no rank has moved for the timeout. A program
//           that throws ends the process: other ranks do not know how far the links have come.
// Threads   one run() at a time per team. They start at first use; the destructor joins them.
// Tests     tests/cpp/stress.cpp, tests/conformance/test_bits.py
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

// The deadline of one collective, and its failure: when no rank moves, the rank that waits for the
// earliest turn waits for the culprit. The first rank whose wait times
// out makes the others give up.
class Watch {
 public:
  Watch(int world_size, std::chrono::nanoseconds timeout)
      : timeout_(timeout), moves_(static_cast<std::size_t>(world_size)) {}

  void progressed(int rank) {
    std::atomic<std::uint64_t>& count = moves_[static_cast<std::size_t>(rank)].count;
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  // Waits, as `rank`, for a counter of another. turn: which message or barrier this rank is at.
  // False on timeout; of all ranks' describe() the one with the lowest turn is kept.
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

  // "... over 4 ranks: rank 0 waited 30 s for rank 3 to send"; call: which one, what: to do what.
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
  Flag started_;  // one tick per run
  std::vector<Flag> finished_ = std::vector<Flag>(static_cast<std::size_t>(world_size_));
  std::atomic<std::uint32_t> stop_{0};
};

}  // namespace pyringar
