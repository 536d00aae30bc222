// rank_team: persistent threads that start together, and a count of the threads that returned.
#include "cpu/rank_team.h"

#include <system_error>

#include "core/error.h"

namespace pyringar {

bool Watch::nap(int rank, Flag& flag, std::uint32_t wanted) {
  Stillness stillness(static_cast<int>(moves_.size()), timeout_);
  const auto moves_of = [&](int r) {
    return moves_[static_cast<std::size_t>(r)].count.load(std::memory_order_relaxed);
  };
  return nap_for_flag(flag, wanted, stillness.nap(), [&] {
    stillness.look(rank, moves_of);
    return given_up_.load(std::memory_order_acquire) != 0 || stillness.all_are_late();
  });
}

RankTeam::~RankTeam() {
  stop_.store(1, std::memory_order_release);
  started_.set(started_.value.load(std::memory_order_relaxed) + 1);
  for (std::thread& thread : threads_) thread.join();
}

void RankTeam::run(const std::function<void(int rank)>& program, CallMode mode) {
  const bool may_join = mode == CallMode::kBlocking && torch_team::is_ready();
  if (may_join && run_in_torch_team(program)) return;
  run_in_own_threads(program);
}

bool RankTeam::run_in_torch_team(const std::function<void(int rank)>& program) {
  const auto run_rank = [&](int rank) noexcept { program(rank); };
  Flag returned;
  return torch_team::try_run([&](int thread, int num_threads) {
    if (num_threads >= world_size_) {
      if (thread < world_size_) run_rank(thread);
      return;
    }
    if (thread != 0) return wait_for_flag(returned, 1);
    struct AtEnd {
      Flag& flag;
      ~AtEnd() { flag.set(1); }
    } at_end{returned};
    run_in_own_threads(program);
  });
}

void RankTeam::run_in_own_threads(const std::function<void(int rank)>& program) {
  const std::uint32_t epoch = started_.value.load(std::memory_order_relaxed) + 1;
  program_ = &program;
  start_threads(epoch - 1);
  affinity_.update_cores();
  affinity_.spread_from_caller(threads_);
  started_.set(epoch);
  // noexcept: an exception would unwind objects on this stack that other ranks use.
  [&]() noexcept { program(0); }();
  for (int rank = 1; rank < world_size_; ++rank) {
    // No deadline is needed: each wait inside the program has a deadline.
    wait_for_flag(finished_[static_cast<std::size_t>(rank)], epoch);
  }
}

// If the system refuses a thread, throw; the next run() starts the missing threads.
void RankTeam::start_threads(std::uint32_t seen) {
  threads_.reserve(static_cast<std::size_t>(world_size_));
  for (int rank = static_cast<int>(threads_.size()) + 1; rank < world_size_; ++rank) {
    try {
      threads_.emplace_back([this, rank, seen] { serve(rank, seen); });
    } catch (const std::system_error& error) {
      fail(ErrorKind::kState, "cannot start a thread for rank ", rank, " of ", world_size_, ": ",
           error.what());
    }
  }
}

void RankTeam::serve(int rank, std::uint32_t seen) {
  while (true) {
    wait_for_flag(started_, ++seen);
    if (stop_.load(std::memory_order_acquire) != 0) return;
    (*program_)(rank);
    finished_[static_cast<std::size_t>(rank)].set(seen);
  }
}

}  // namespace pyringar
