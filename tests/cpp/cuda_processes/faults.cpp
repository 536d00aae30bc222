// faults: ranks that die, are late or fail. Every stream ends. Calls with undefined results are
// reported once, and all other results are right.
#include <atomic>
#include <string>
#include <thread>

#include "rank_threads.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

using Submitted = CudaProcessGroup::Submitted;
using namespace std::chrono_literals;

std::string name_of(int rank) { return join("rank ", rank, " (process "); }
// Part of the timeout message that names the late rank.
std::string late_name_of(int rank) { return join("waited for that of ", name_of(rank)); }

bool is_void(CudaProcessGroup& group, const Submitted& work) {
  return pyringar::is_void(group.host().segment(), *work.last);
}

// One rank's calls on a stream, and their outcomes.
struct RankCalls {
  const std::vector<Case>& cases;
  std::vector<AllTensors>& tensors;
  CudaProcessGroup& group;
  const int rank;
  const cuda::Stream stream{group.device()};
  std::vector<Submitted> works{};

  void enqueue_all() {
    for (std::size_t i = 0; i < cases.size(); ++i) enqueue(i);
  }
  void enqueue(std::size_t i) {
    works.push_back(enqueue_case(cases[i], tensors[i][rank], group, stream.get()));
  }
  // Enqueue cases from index `first` until a call fails. Return its message, or "".
  std::string enqueue_from(std::size_t first, ErrorKind kind) {
    for (std::size_t i = first; i < cases.size(); ++i) {
      try {
        enqueue(i);
      } catch (const Error& error) {
        CHECK(error.kind() == kind, error.what());
        return error.what();
      }
    }
    return "";
  }
  // Check all results except those of void calls, which lack a lost rank's data. Count void calls.
  int check_results() const {
    int num_void = 0;
    for (std::size_t i = 0; i < works.size(); ++i) {
      if (is_void(group, works[i])) {
        num_void += 1;
      } else {
        tensors[i].check(cases[i], rank);
      }
    }
    return num_void;
  }
  // Check that a failure is reported once: by a call, a work, or close().
  void check_reported(Random& random, ErrorKind kind, int culprit, bool is_reported) {
    const int num_void = check_results();
    const bool is_late = kind == ErrorKind::kTimeout;
    const std::string name = is_late ? late_name_of(culprit) : name_of(culprit);
    if (random.one_in(2)) {
      for (const Submitted& work : works) {
        const std::exception_ptr failure = group.failure_of(work);
        CHECK((failure != nullptr) == is_void(group, work), "failure_of() and is_void() disagree");
        if (failure == nullptr) continue;
        is_reported = true;
        check_throws(kind, name, [&] { std::rethrow_exception(failure); });
      }
    }
    const auto close = [&] { group.close(); };
    if (num_void > 0 && !is_reported) check_throws(kind, name, close);
    close();
  }
};

thread_local std::function<void()> nap;

CudaProcessOptions options_with(Random& random, std::chrono::nanoseconds timeout) {
  CudaProcessOptions options = random_options(random);
  options.timeout = timeout;
  options.on_nap = [] {
    if (nap) nap();
  };
  return options;
}

// Random calls of two to four ranks. `odd` is the faulty rank.
struct FaultSetup {
  explicit FaultSetup(Random& random, std::size_t num_cases,
                      std::chrono::nanoseconds timeout = kLong, int num_ranks = 0)
      : world_size(num_ranks > 0 ? num_ranks : random.between(2, 4)),
        odd(random.between(0, world_size - 1)),
        ranks(random, world_size, options_with(random, timeout), random.between(1, 30), true) {
    for (std::size_t i = 0; i < num_cases; ++i) cases.push_back(plain_case(1 + random.below(6000)));
  }

  void run(const std::function<void(RankCalls& calls)>& program) {
    tensors = make_all_tensors(cases, world_size);
    ranks.run([&](CudaProcessGroup& group, int rank) {
      group.connect();
      RankCalls calls{cases, tensors, group, rank};
      program(calls);
    });
  }

  const int world_size;
  const int odd;
  const RankThreads ranks;
  std::vector<Case> cases{};
  std::vector<AllTensors> tensors{};
};

// How one rank's process dies: between calls or in a host wait, with its GPU busy or done.
struct Death {
  Death(Random& random, int world_size, const std::vector<Case>& cases)
      : victim(random.between(0, world_size - 1)),
        last_one((victim + 1) % world_size),
        at(random.below(cases.size() + 1)),
        busy_from(random.below(at + 2)),
        is_done_before(random.one_in(3)),
        is_waiting(at < cases.size() && !cases[at].is_async && random.one_in(2)) {}

  const int victim;
  const int last_one;  // joins the call after the victim has died in it (if is_waiting)
  const std::size_t at;
  const std::size_t busy_from;
  const bool is_done_before;
  const bool is_waiting;
  std::atomic<bool> has_come{false};

  void meet(const RankThreads& ranks, RankCalls& calls) {
    const auto die = [&] {
      ranks.kill(calls.group);
      has_come = true;
      throw RankThreads::Killed{};
    };
    for (std::size_t i = 0; i < at; ++i) {
      if (i == busy_from && !is_done_before) hold(victim, true);
      calls.enqueue(i);
    }
    if (is_done_before) {
      synchronize(calls.stream.get());
      CHECK(calls.check_results() == 0, "void before the rank died");
    }
    if (is_waiting) {
      nap = die;
      calls.enqueue(at);
    }
    die();
  }

  void survive(Random& random, RankCalls& calls) const {
    std::size_t first = 0;
    if (calls.rank == last_one && is_waiting) {
      while (first < at) calls.enqueue(first++);
      while (!has_come) std::this_thread::yield();
    }
    const std::string why = calls.enqueue_from(first, ErrorKind::kPeerLost);
    CHECK(why.empty() || why.find(name_of(victim)) != std::string::npos, why);
    synchronize(calls.stream.get());
    calls.check_reported(random, ErrorKind::kPeerLost, victim, !why.empty());
  }
};

void check_death(Random& random) {
  FaultSetup setup(random, 0);
  const std::size_t num_cases = 1 + random.below(6);
  for (std::size_t i = 0; i < num_cases; ++i) {
    const std::size_t slot_bytes = setup.ranks.options().slot_bytes;
    setup.cases.push_back(make_case(random, setup.world_size, slot_bytes));
  }
  Death death(random, setup.world_size, setup.cases);
  const std::uint64_t seed = random.bits();
  setup.run([&](RankCalls& calls) {
    Random own(seed + static_cast<std::uint64_t>(calls.rank));
    calls.rank == death.victim ? death.meet(setup.ranks, calls) : death.survive(own, calls);
  });
}

// A device that does not start a call is reported late once another device has started it.
void check_late(Random& random) {
  FaultSetup setup(random, 1 + random.below(4), 300ms);
  const std::uint64_t seed = random.bits();
  std::atomic<int> num_done{0};
  setup.run([&](RankCalls& calls) {
    const bool is_odd = calls.rank == setup.odd;
    if (is_odd) hold(calls.rank, true);
    std::string why = calls.enqueue_from(0, ErrorKind::kTimeout);
    if (is_odd) {
      while (num_done < setup.world_size - 1) std::this_thread::yield();
      hold(calls.rank, false);
    }
    const Stopwatch watch;
    synchronize(calls.stream.get());
    CHECK(watch.seconds() < kGraceSeconds, "streams waited for long");
    num_done += 1;
    if (why.empty()) {
      CHECK(is_void(calls.group, calls.works.back()), "the late rank is not reported");
      if (seed % 2 == 0) {
        check_throws(ErrorKind::kTimeout, late_name_of(setup.odd), [&] { calls.enqueue(0); });
        why = "reported";
      }
    }
    while (num_done < setup.world_size) std::this_thread::yield();
    Random own(seed);
    calls.check_reported(own, ErrorKind::kTimeout, setup.odd, !why.empty());
  });
}

// A device that stops within a call is reported late. Its waiting peers are not.
void check_late_midway(Random& random) {
  FaultSetup setup(random, 4, 300ms);
  const std::uint64_t seed = random.bits();
  std::atomic<int> num_done{0};
  setup.run([&](RankCalls& calls) {
    const std::string why = calls.enqueue_from(0, ErrorKind::kTimeout);
    if (calls.rank == setup.odd && why.empty()) {
      const DeviceLine& own = calls.group.host().segment().device(calls.rank);
      const std::uint32_t last = *calls.works.back().last;
      while (own.announced.value == own.finished.value && own.finished.value != last) cpu_pause();
      hold(calls.rank, true);
      while (num_done < setup.world_size - 1) std::this_thread::yield();
      hold(calls.rank, false);
    }
    synchronize(calls.stream.get());
    num_done += 1;
    while (num_done < setup.world_size) std::this_thread::yield();
    Random own(seed);
    calls.check_reported(own, ErrorKind::kTimeout, setup.odd, !why.empty());
  });
}

// If all devices are busy for longer than the timeout, no rank is late.
void check_busy(Random& random) {
  constexpr auto kTimeout = 500ms;
  FaultSetup setup(random, 2, kTimeout);
  std::atomic<int> num_enqueued{0};
  setup.run([&](RankCalls& calls) {
    hold(calls.rank, true);
    calls.enqueue_all();
    num_enqueued += 1;
    while (num_enqueued < setup.world_size) std::this_thread::yield();
    if (calls.rank == 0) {
      std::this_thread::sleep_for(2 * kTimeout);
      for (int rank = 0; rank < setup.world_size; ++rank) hold(rank, false);
    }
    synchronize(calls.stream.get());
    CHECK(calls.check_results() == 0, "right results are void");
  });
}

// If ranks call different operations, calls that were enqueued before give right results.
void check_earlier_calls(Random& random) {
  FaultSetup setup(random, 1 + random.below(3));
  setup.run([&](RankCalls& calls) {
    const bool is_odd = calls.rank == setup.odd;
    if (is_odd) hold(calls.rank, true);
    calls.enqueue_all();
    const Case differs = plain_case(is_odd ? 10 : 20);
    AllTensors others(differs, setup.world_size);
    check_throws(ErrorKind::kArgument, "ranks call different things", [&] {
      enqueue_case(differs, others[calls.rank], calls.group, calls.stream.get());
    });
    if (is_odd) {
      std::this_thread::sleep_for(200ms);
      hold(calls.rank, false);
    }
    synchronize(calls.stream.get());
    CHECK(calls.check_results() == 0, "right results are void");
    check_unchanged(others[calls.rank]);
  });
}

// If one rank's launch fails, no stream waits for work that the rank did not enqueue.
void check_refused_launch(Random& random) {
  FaultSetup setup(random, 4);
  const int after = random.between(0, 6);
  setup.run([&](RankCalls& calls) {
    const bool is_odd = calls.rank == setup.odd;
    if (is_odd) refuse_launch(calls.rank, after);
    const std::string why = calls.enqueue_from(0, is_odd ? ErrorKind::kCuda : ErrorKind::kState);
    CHECK(why.empty() || why.find("launch of fused") != std::string::npos, why);
    synchronize(calls.stream.get());
    CHECK(calls.check_results() == 0, "right results are void");
  });
}

// An abort by one rank ends the group on all ranks, even while streams wait.
void check_abort(Random& random) {
  FaultSetup setup(random, 1 + random.below(3));
  const int aborting = (setup.odd + 1) % setup.world_size;
  std::atomic<int> num_enqueued{0};
  std::atomic<bool> has_aborted{false};
  setup.run([&](RankCalls& calls) {
    if (calls.rank == setup.odd) hold(calls.rank, true);
    calls.enqueue_all();
    num_enqueued += 1;
    while (num_enqueued < setup.world_size) std::this_thread::yield();
    if (calls.rank == aborting) {
      const Stopwatch watch;
      CHECK(calls.group.close(CloseMode::kAborting), "close() returned false");
      CHECK(watch.seconds() < kGraceSeconds, "abort waited for long");
      has_aborted = true;
    } else {
      while (!has_aborted) std::this_thread::yield();
    }
    if (calls.rank == setup.odd) hold(calls.rank, false);
    synchronize(calls.stream.get());
    const int num_void = calls.check_results();
    if (calls.rank != aborting && num_void > 0) {
      check_throws(ErrorKind::kPeerLost, "has aborted", [&] { calls.group.close(); });
    }
  });
}

struct Interrupt {};

// An exception of a signal handler ends the wait of close().
void interrupt_close(CudaProcessGroup& group) {
  nap = [&] {
    check_throws(ErrorKind::kState, "signal handler", [&] { group.close(); });
    throw Interrupt{};
  };
  try {
    group.close();
    CHECK(false, "no handler ran");
  } catch (const Interrupt&) {
  }
  nap = {};
}

// close() of a rank whose GPU is busy raises once. Its tensors stay in use until the GPU is done.
void check_close_of_a_busy_rank(Random& random) {
  FaultSetup setup(random, 1, 100ms, 2);
  setup.cases[0].is_async = true;
  const bool is_interrupted = random.one_in(2);
  // If true, only rank 0's GPU is held. Rank 1's stream waits for it, and may report it late.
  const bool is_missed = random.one_in(2);
  std::atomic<int> num_enqueued{0};
  std::atomic<bool> is_over{false};
  setup.run([&](RankCalls& calls) {
    if (calls.rank == 0 || !is_missed) hold(calls.rank, true);
    calls.enqueue(0);
    num_enqueued += 1;
    while (num_enqueued < 2) std::this_thread::yield();
    if (calls.rank == 0) {
      if (is_interrupted) interrupt_close(calls.group);
      check_throws(ErrorKind::kTimeout, "has not finished its calls", [&] { calls.group.close(); });
      CHECK(!calls.group.close(), "close() released tensors in use");
      is_over = true;
    }
    while (!is_over) std::this_thread::yield();
    hold(calls.rank, false);
    synchronize(calls.stream.get());
    if (calls.rank == 0) {
      CHECK(calls.group.close(), "the GPU is not idle");
    } else if (calls.check_results() > 0) {
      check_throws(ErrorKind::kTimeout, name_of(0), [&] { calls.group.close(); });
    }
  });
}

const Part kDeath("death", &check_death);
const Part kLate("late", &check_late, 10);
const Part kLateMidway("late-midway", &check_late_midway, 10);
const Part kBusy("busy", &check_busy, 20);
const Part kEarlierCalls("earlier-calls", &check_earlier_calls, 5);
const Part kRefusedLaunch("refused-launch", &check_refused_launch, 4);
const Part kAbort("abort", &check_abort, 5);
const Part kCloseBusy("close-busy", &check_close_of_a_busy_rank, 10);

}  // namespace

}  // namespace pyringar::stress
