// faults: ranks that die, are late or fail: every stream comes to an end, what is right is not
// called void, and what is void is told.

#include <atomic>
#include <string>
#include <thread>

#include "crew.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

using Submitted = CudaProcessGroup::Submitted;
using namespace std::chrono_literals;

std::string name_of(int rank) { return join("rank ", rank, " (process "); }
// Of whom a device waited for: the text names both.
std::string late_name_of(int rank) { return join("waited for that of ", name_of(rank)); }

bool is_void(CudaProcessGroup& group, const Submitted& work) {
  return pyringar::is_void(group.host().segment(), *work.last);
}

// Calls on streams of their own, and what became of each.
struct Calls {
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
  // Until one fails; returns why.
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
  // All streams have come to an end: whatever is not void must be right.
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
  // Once, by the work or by close(), unless a call has said so.
  void check_told(Random& random, ErrorKind kind, int culprit, bool is_told) {
    const int num_void = check_results();
    const bool is_late = kind == ErrorKind::kTimeout;
    const std::string name = is_late ? late_name_of(culprit) : name_of(culprit);
    if (random.one_in(2)) {
      for (const Submitted& work : works) {
        const std::exception_ptr failure = group.failure_of(work);
        CHECK((failure != nullptr) == is_void(group, work), "a work does not say what it is");
        if (failure == nullptr) continue;
        is_told = true;
        check_throws(kind, name, [&] { std::rethrow_exception(failure); });
      }
    }
    const auto close = [&] { group.close(); };
    if (num_void > 0 && !is_told) check_throws(kind, name, close);
    close();
  }
};

// What a nap of the calling thread does.
thread_local std::function<void()> nap;

CudaProcessOptions options_with(Random& random, std::chrono::nanoseconds timeout) {
  CudaProcessOptions options = random_options(random);
  options.timeout = timeout;
  options.on_nap = [] {
    if (nap) nap();
  };
  return options;
}

// A few cases, on two to four ranks, one of them the odd one out.
struct Scene {
  explicit Scene(Random& random, std::size_t num_cases, std::chrono::nanoseconds timeout = kLong,
                 int num_ranks = 0)
      : world_size(num_ranks > 0 ? num_ranks : random.between(2, 4)),
        odd(random.between(0, world_size - 1)),
        crew(random, world_size, options_with(random, timeout), random.between(1, 30), true) {
    for (std::size_t i = 0; i < num_cases; ++i) cases.push_back(plain_case(1 + random.below(6000)));
  }

  // program(calls), on all ranks at once.
  void run(const std::function<void(Calls& calls)>& program) {
    tensors = make_all_tensors(cases, world_size);
    crew.run([&](CudaProcessGroup& group, int rank) {
      group.connect();
      Calls calls{cases, tensors, group, rank};
      program(calls);
    });
  }

  const int world_size;
  const int odd;
  const Crew crew;
  std::vector<Case> cases{};
  std::vector<AllTensors> tensors{};
};

// How the process of one rank comes to its end: between two calls, or while its host waits in one;
// with its device far behind, somewhere, or at the end of all it was asked to do.
struct Death {
  Death(Random& random, int world_size, const std::vector<Case>& cases)
      : victim(random.between(0, world_size - 1)),
        last_one((victim + 1) % world_size),
        at(random.below(cases.size() + 1)),
        busy_from(random.below(at + 2)),
        is_done_before(random.one_in(3)),
        is_waiting(at < cases.size() && !cases[at].is_async && random.one_in(2)) {}

  const int victim;
  const int last_one;  // joins the call in which the victim dies later
  const std::size_t at;
  const std::size_t busy_from;
  const bool is_done_before;
  const bool is_waiting;
  std::atomic<bool> has_come{false};

  void meet(const Crew& crew, Calls& calls) {
    const auto die = [&] {
      crew.kill(calls.group);
      has_come = true;
      throw Crew::Killed{};
    };
    for (std::size_t i = 0; i < at; ++i) {
      if (i == busy_from && !is_done_before) hold(victim, true);
      calls.enqueue(i);
    }
    if (is_done_before) {
      synchronize(calls.stream.get());
      CHECK(calls.check_results() == 0, "void before anybody died");
    }
    if (is_waiting) {
      nap = die;
      calls.enqueue(at);
    }
    die();
  }

  void survive(Random& random, Calls& calls) const {
    std::size_t first = 0;
    if (calls.rank == last_one && is_waiting) {
      while (first < at) calls.enqueue(first++);
      while (!has_come) std::this_thread::yield();
    }
    const std::string why = calls.enqueue_from(first, ErrorKind::kPeerLost);
    CHECK(why.empty() || why.find(name_of(victim)) != std::string::npos, why);
    synchronize(calls.stream.get());
    calls.check_told(random, ErrorKind::kPeerLost, victim, !why.empty());
  }
};

void check_death(Random& random) {
  Scene scene(random, 0);
  const std::size_t num_cases = 1 + random.below(6);
  for (std::size_t i = 0; i < num_cases; ++i) {
    const std::size_t slot_bytes = scene.crew.options().slot_bytes;
    scene.cases.push_back(make_case(random, scene.world_size, slot_bytes));
  }
  Death death(random, scene.world_size, scene.cases);
  const std::uint64_t seed = random.bits();
  scene.run([&](Calls& calls) {
    Random own(seed + static_cast<std::uint64_t>(calls.rank));
    calls.rank == death.victim ? death.meet(scene.crew, calls) : death.survive(own, calls);
  });
}

// A device that does not come to a call is late where another's has come; with its host's.
void check_late(Random& random) {
  Scene scene(random, 1 + random.below(4), 300ms);
  const std::uint64_t seed = random.bits();
  std::atomic<int> num_done{0};
  scene.run([&](Calls& calls) {
    const bool is_odd = calls.rank == scene.odd;
    if (is_odd) hold(calls.rank, true);
    std::string why = calls.enqueue_from(0, ErrorKind::kTimeout);
    if (is_odd) {
      while (num_done < scene.world_size - 1) std::this_thread::yield();
      hold(calls.rank, false);
    }
    const Stopwatch watch;
    synchronize(calls.stream.get());
    CHECK(watch.seconds() < kGraceSeconds, "streams waited for long");
    num_done += 1;
    if (why.empty()) {
      CHECK(is_void(calls.group, calls.works.back()), "nobody noticed");
      if (seed % 2 == 0) {
        check_throws(ErrorKind::kTimeout, late_name_of(scene.odd), [&] { calls.enqueue(0); });
        why = "told";
      }
    }
    while (num_done < scene.world_size) std::this_thread::yield();
    Random own(seed);
    calls.check_told(own, ErrorKind::kTimeout, scene.odd, !why.empty());
  });
}

// A device that stops within a call, for which its peers wait: it is late, and they are not.
void check_late_midway(Random& random) {
  Scene scene(random, 4, 300ms);
  const std::uint64_t seed = random.bits();
  std::atomic<int> num_done{0};
  scene.run([&](Calls& calls) {
    const std::string why = calls.enqueue_from(0, ErrorKind::kTimeout);
    if (calls.rank == scene.odd && why.empty()) {
      const DeviceLine& own = calls.group.host().segment().device(calls.rank);
      const std::uint32_t last = *calls.works.back().last;
      while (own.announced.value == own.finished.value && own.finished.value != last) cpu_pause();
      hold(calls.rank, true);
      while (num_done < scene.world_size - 1) std::this_thread::yield();
      hold(calls.rank, false);
    }
    synchronize(calls.stream.get());
    num_done += 1;
    while (num_done < scene.world_size) std::this_thread::yield();
    Random own(seed);
    calls.check_told(own, ErrorKind::kTimeout, scene.odd, !why.empty());
  });
}

// All devices do other work for longer than the timeout: nobody waits for anybody.
void check_busy(Random& random) {
  constexpr auto kTimeout = 500ms;
  Scene scene(random, 2, kTimeout);
  std::atomic<int> num_enqueued{0};
  scene.run([&](Calls& calls) {
    hold(calls.rank, true);
    calls.enqueue_all();
    num_enqueued += 1;
    while (num_enqueued < scene.world_size) std::this_thread::yield();
    if (calls.rank == 0) {
      std::this_thread::sleep_for(2 * kTimeout);
      for (int rank = 0; rank < scene.world_size; ++rank) hold(rank, false);
    }
    synchronize(calls.stream.get());
    CHECK(calls.check_results() == 0, "void without need");
  });
}

// A failure that leaves all devices be: calls that were enqueued before it are right.
void check_earlier_calls(Random& random) {
  Scene scene(random, 1 + random.below(3));
  scene.run([&](Calls& calls) {
    const bool is_odd = calls.rank == scene.odd;
    if (is_odd) hold(calls.rank, true);
    calls.enqueue_all();
    const Case differs = plain_case(is_odd ? 10 : 20);
    AllTensors others(differs, scene.world_size);
    check_throws(ErrorKind::kArgument, "ranks call different things", [&] {
      enqueue_case(differs, others[calls.rank], calls.group, calls.stream.get());
    });
    if (is_odd) {
      std::this_thread::sleep_for(200ms);
      hold(calls.rank, false);
    }
    synchronize(calls.stream.get());
    CHECK(calls.check_results() == 0, "void without need");
    check_unchanged(others[calls.rank]);
  });
}

// One rank's launch fails in the midst of a call: nothing waits for what it did not enqueue.
void check_refused_launch(Random& random) {
  Scene scene(random, 4);
  const int after = random.between(0, 6);
  scene.run([&](Calls& calls) {
    const bool is_odd = calls.rank == scene.odd;
    if (is_odd) refuse_launch(calls.rank, after);
    const std::string why = calls.enqueue_from(0, is_odd ? ErrorKind::kCuda : ErrorKind::kState);
    CHECK(why.empty() || why.find("launch of fused") != std::string::npos, why);
    synchronize(calls.stream.get());
    CHECK(calls.check_results() == 0, "void without need");
  });
}

// One rank ends the group for all, at once, whatever its stream waits for.
void check_abort(Random& random) {
  Scene scene(random, 1 + random.below(3));
  const int aborting = (scene.odd + 1) % scene.world_size;
  std::atomic<int> num_enqueued{0};
  std::atomic<bool> has_aborted{false};
  scene.run([&](Calls& calls) {
    if (calls.rank == scene.odd) hold(calls.rank, true);
    calls.enqueue_all();
    num_enqueued += 1;
    while (num_enqueued < scene.world_size) std::this_thread::yield();
    if (calls.rank == aborting) {
      const Stopwatch watch;
      CHECK(calls.group.close(CloseMode::kAborting), "it has not closed");
      CHECK(watch.seconds() < kGraceSeconds, "abort waited for long");
      has_aborted = true;
    } else {
      while (!has_aborted) std::this_thread::yield();
    }
    if (calls.rank == scene.odd) hold(calls.rank, false);
    synchronize(calls.stream.get());
    const int num_void = calls.check_results();
    if (calls.rank != aborting && num_void > 0) {
      check_throws(ErrorKind::kPeerLost, "has aborted", [&] { calls.group.close(); });
    }
  });
}

struct Interrupt {};

// The wait of close() ends where a signal's handler throws.
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

// A rank closes while its GPU is busy with other work: it is told, once, and its tensors stay in
// use until the GPU has come to its calls.
void check_close_of_a_busy_rank(Random& random) {
  Scene scene(random, 1, 100ms, 2);
  scene.cases[0].is_async = true;
  const bool is_interrupted = random.one_in(2);
  const bool is_missed = random.one_in(2);  // by the other rank, which calls it late first
  std::atomic<int> num_enqueued{0};
  std::atomic<bool> is_over{false};
  scene.run([&](Calls& calls) {
    if (calls.rank == 0 || !is_missed) hold(calls.rank, true);
    calls.enqueue(0);
    num_enqueued += 1;
    while (num_enqueued < 2) std::this_thread::yield();
    if (calls.rank == 0) {
      if (is_interrupted) interrupt_close(calls.group);
      check_throws(ErrorKind::kTimeout, "has not come to the end", [&] { calls.group.close(); });
      CHECK(!calls.group.close(), "tensors in use are let go of");
      is_over = true;
    }
    while (!is_over) std::this_thread::yield();
    hold(calls.rank, false);
    synchronize(calls.stream.get());
    if (calls.rank == 0) {
      CHECK(calls.group.close(), "its GPU is not done");
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
