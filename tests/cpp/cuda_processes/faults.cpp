// faults: ranks that die, are late or fail: every stream comes to an end, what is right is not
// called void, and what is void is told.

#include <atomic>
#include <string>
#include <thread>

#include "crew.h"

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
  std::vector<std::vector<Tensors>>& tensors;
  CudaProcessGroup& group;
  const int rank;
  const cuda::Stream stream{group.device()};
  std::vector<Submitted> works{};

  void enqueue(std::size_t i) {
    Tensors& own = tensors[i][static_cast<Rank>(rank)];
    works.push_back(enqueue_case(cases[i], own, group, stream.get()));
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
        check_case(cases[i], tensors[i], rank);
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

std::vector<Case> random_cases(Random& random, int world_size, const CudaProcessOptions& options) {
  std::vector<Case> cases;
  const std::size_t num_cases = 1 + random.below(6);
  for (std::size_t i = 0; i < num_cases; ++i) {
    cases.push_back(make_case(random, world_size, options.slot_bytes));
  }
  return cases;
}

std::vector<Case> plain_cases(Random& random, std::size_t count) {
  std::vector<Case> cases;
  for (std::size_t i = 0; i < count; ++i) cases.push_back(plain_case(1 + random.below(6000)));
  return cases;
}

// What a nap of the calling thread does.
thread_local std::function<void()> nap;

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
  const int world_size = random.between(2, 4);
  CudaProcessOptions options = random_options(random);
  options.on_nap = [] {
    if (nap) nap();
  };
  const Crew crew(random, world_size, options, random.one_in(2) ? 0 : random.between(1, 30), true);
  const std::vector<Case> cases = random_cases(random, world_size, options);
  std::vector<std::vector<Tensors>> tensors = make_all_tensors(cases, world_size);
  Death death(random, world_size, cases);
  const std::uint64_t seed = random.bits();
  crew.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    Calls calls{cases, tensors, group, rank};
    Random own(seed + static_cast<std::uint64_t>(rank));
    rank == death.victim ? death.meet(crew, calls) : death.survive(own, calls);
  });
}

// A device that does not come to a call is late where another's has come; with its host's.
void check_late(Random& random) {
  const int world_size = random.between(2, 4);
  const int culprit = random.between(0, world_size - 1);
  CudaProcessOptions options = random_options(random);
  options.timeout = 300ms;
  const Crew crew(random, world_size, options, random.between(1, 30), true);
  const std::vector<Case> cases = plain_cases(random, 1 + random.below(4));
  std::vector<std::vector<Tensors>> tensors = make_all_tensors(cases, world_size);
  const std::uint64_t seed = random.bits();
  std::atomic<int> num_done{0};
  crew.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    if (rank == culprit) hold(rank, true);
    Calls calls{cases, tensors, group, rank};
    std::string why = calls.enqueue_from(0, ErrorKind::kTimeout);
    if (rank == culprit) {
      while (num_done < world_size - 1) std::this_thread::yield();
      hold(rank, false);
    }
    const Stopwatch watch;
    synchronize(calls.stream.get());
    CHECK(watch.seconds() < kGraceSeconds, "streams waited for long");
    num_done += 1;
    if (why.empty()) {
      CHECK(is_void(group, calls.works.back()), "nobody noticed");
      const auto again = [&] { calls.enqueue(0); };
      if (seed % 2 == 0) {
        check_throws(ErrorKind::kTimeout, late_name_of(culprit), again);
        why = "told";
      }
    }
    while (num_done < world_size) std::this_thread::yield();
    Random own(seed);
    calls.check_told(own, ErrorKind::kTimeout, culprit, !why.empty());
  });
}

// A device that stops within a call, for which its peers wait: it is late, and they are not.
void check_late_midway(Random& random) {
  const int world_size = random.between(2, 4);
  const int culprit = random.between(0, world_size - 1);
  CudaProcessOptions options = random_options(random);
  options.timeout = 300ms;
  const Crew crew(random, world_size, options, random.between(1, 30), true);
  const std::vector<Case> cases = plain_cases(random, 4);
  std::vector<std::vector<Tensors>> tensors = make_all_tensors(cases, world_size);
  const std::uint64_t seed = random.bits();
  std::atomic<int> num_done{0};
  crew.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    Calls calls{cases, tensors, group, rank};
    const std::string why = calls.enqueue_from(0, ErrorKind::kTimeout);
    if (rank == culprit && why.empty()) {
      const DeviceLine& own = group.host().segment().device(rank);
      const std::uint32_t last = *calls.works.back().last;
      while (own.announced.value == own.finished.value && own.finished.value != last) cpu_pause();
      hold(rank, true);
      while (num_done < world_size - 1) std::this_thread::yield();
      hold(rank, false);
    }
    synchronize(calls.stream.get());
    num_done += 1;
    while (num_done < world_size) std::this_thread::yield();
    Random own(seed);
    calls.check_told(own, ErrorKind::kTimeout, culprit, !why.empty());
  });
}

// All devices do other work for longer than the timeout: nobody waits for anybody.
void check_busy(Random& random) {
  const int world_size = random.between(2, 4);
  CudaProcessOptions options = random_options(random);
  options.timeout = 500ms;
  const Crew crew(random, world_size, options, random.between(1, 30), true);
  const std::vector<Case> cases = plain_cases(random, 2);
  std::vector<std::vector<Tensors>> tensors = make_all_tensors(cases, world_size);
  std::atomic<int> num_enqueued{0};
  crew.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    hold(rank, true);
    Calls calls{cases, tensors, group, rank};
    for (std::size_t i = 0; i < cases.size(); ++i) calls.enqueue(i);
    num_enqueued += 1;
    while (num_enqueued < world_size) std::this_thread::yield();
    if (rank == 0) {
      std::this_thread::sleep_for(2 * options.timeout);
      for (int r = 0; r < world_size; ++r) hold(r, false);
    }
    synchronize(calls.stream.get());
    CHECK(calls.check_results() == 0, "void without need");
  });
}

// A failure that leaves all devices be: calls that were enqueued before it are right.
void check_earlier_calls(Random& random) {
  const int world_size = random.between(2, 4);
  const int odd = random.between(0, world_size - 1);
  CudaProcessOptions options = random_options(random);
  const Crew crew(random, world_size, options, random.between(1, 30), true);
  const std::vector<Case> cases = plain_cases(random, 1 + random.below(3));
  std::vector<std::vector<Tensors>> tensors = make_all_tensors(cases, world_size);
  crew.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    if (rank == odd) hold(rank, true);
    Calls calls{cases, tensors, group, rank};
    for (std::size_t i = 0; i < cases.size(); ++i) calls.enqueue(i);
    const Case differs = plain_case(rank == odd ? 10 : 20);
    Tensors others = make_tensors(differs, world_size, rank);
    check_throws(ErrorKind::kArgument, "ranks call different things",
                 [&] { enqueue_case(differs, others, group, calls.stream.get()); });
    if (rank == odd) {
      std::this_thread::sleep_for(200ms);
      hold(rank, false);
    }
    synchronize(calls.stream.get());
    CHECK(calls.check_results() == 0, "void without need");
    check_unchanged(others);
  });
}

// One rank's launch fails in the midst of a call: nothing waits for what it did not enqueue.
void check_refused_launch(Random& random) {
  const int world_size = random.between(2, 4);
  const int odd = random.between(0, world_size - 1);
  const CudaProcessOptions options = random_options(random);
  const Crew crew(random, world_size, options, random.between(1, 30), true);
  const std::vector<Case> cases = plain_cases(random, 4);
  std::vector<std::vector<Tensors>> tensors = make_all_tensors(cases, world_size);
  const int after = random.between(0, 6);
  crew.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    if (rank == odd) refuse_launch(rank, after);
    Calls calls{cases, tensors, group, rank};
    const std::string why =
        calls.enqueue_from(0, rank == odd ? ErrorKind::kCuda : ErrorKind::kState);
    CHECK(why.empty() || why.find("launch of fused") != std::string::npos, why);
    synchronize(calls.stream.get());
    CHECK(calls.check_results() == 0, "void without need");
  });
}

// One rank ends the group for all, at once, whatever its stream waits for.
void check_abort(Random& random) {
  const int world_size = random.between(2, 4);
  const int busy = random.between(0, world_size - 1);
  const int aborting = (busy + 1) % world_size;
  CudaProcessOptions options = random_options(random);
  const Crew crew(random, world_size, options, random.between(1, 30), true);
  const std::vector<Case> cases = plain_cases(random, 1 + random.below(3));
  std::vector<std::vector<Tensors>> tensors = make_all_tensors(cases, world_size);
  std::atomic<int> num_enqueued{0};
  std::atomic<bool> has_aborted{false};
  crew.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    if (rank == busy) hold(rank, true);
    Calls calls{cases, tensors, group, rank};
    for (std::size_t i = 0; i < cases.size(); ++i) calls.enqueue(i);
    num_enqueued += 1;
    while (num_enqueued < world_size) std::this_thread::yield();
    if (rank == aborting) {
      const Stopwatch watch;
      CHECK(group.close(Leaving::kAborting), "it has not closed");
      CHECK(watch.seconds() < kGraceSeconds, "abort waited for long");
      has_aborted = true;
    } else {
      while (!has_aborted) std::this_thread::yield();
    }
    if (rank == busy) hold(rank, false);
    synchronize(calls.stream.get());
    const int num_void = calls.check_results();
    if (rank != aborting && num_void > 0) {
      check_throws(ErrorKind::kPeerLost, "has aborted", [&] { group.close(); });
    }
  });
}

// A rank closes while its GPU is busy with other work: it is told, once, and its tensors stay in
// use until the GPU has come to its calls. A signal's handler may end the wait.
void check_close_of_a_busy_rank(Random& random) {
  struct Interrupt {};
  CudaProcessOptions options = random_options(random);
  options.timeout = 100ms;
  options.on_nap = [] {
    if (nap) nap();
  };
  const Crew crew(random, 2, options, random.between(1, 30), true);
  std::vector<Case> cases = plain_cases(random, 1);
  cases[0].is_async = true;
  std::vector<std::vector<Tensors>> tensors = make_all_tensors(cases, 2);
  const bool is_interrupted = random.one_in(2);
  const bool is_missed = random.one_in(2);  // by the other rank, which calls it late first
  std::atomic<int> num_enqueued{0};
  std::atomic<bool> is_over{false};
  crew.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    if (rank == 0 || !is_missed) hold(rank, true);
    Calls calls{cases, tensors, group, rank};
    calls.enqueue(0);
    num_enqueued += 1;
    while (num_enqueued < 2) std::this_thread::yield();
    if (rank == 0 && is_interrupted) {
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
    if (rank == 0) {
      check_throws(ErrorKind::kTimeout, "has not come to the end", [&] { group.close(); });
      CHECK(!group.close(), "tensors in use are let go of");
      is_over = true;
    }
    while (!is_over) std::this_thread::yield();
    hold(rank, false);
    synchronize(calls.stream.get());
    if (rank == 0) {
      CHECK(group.close(), "its GPU is not done");
    } else if (calls.check_results() > 0) {
      check_throws(ErrorKind::kTimeout, name_of(0), [&] { group.close(); });
    }
  });
}

// A capture that a forbidden call has ended is refused before other ranks hear of the call.
void check_broken_capture(Random& random) {
  const Crew crew(random, 2, random_options(random), random.between(1, 30), true);
  crew.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    const cuda::Stream stream(group.device());
    const auto meet = [&] {
      ProcessCall call;
      call.kind = CallKind::kBarrier;
      group.run(call, stream.get());
    };
    if (rank == 0) {
      cuda::check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeRelaxed), "capture");
      CHECK(cudaStreamSynchronize(stream.get()) != cudaSuccess, "waited for a capture");
      check_throws(ErrorKind::kUnsupported, "cannot capture", meet);
      cudaGraph_t graph = nullptr;
      CHECK(cudaStreamEndCapture(stream.get(), &graph) != cudaSuccess, "it gave a graph");
      cudaGetLastError();
    }
    meet();
    synchronize(stream.get());
  });
}

}  // namespace

const std::vector<Part> kFaults = {
    {"death", &check_death, 1},
    {"late", &check_late, 10},
    {"late-midway", &check_late_midway, 10},
    {"busy", &check_busy, 20},
    {"earlier-calls", &check_earlier_calls, 5},
    {"refused-launch", &check_refused_launch, 4},
    {"abort", &check_abort, 5},
    {"close-busy", &check_close_of_a_busy_rank, 10},
    {"broken-capture", &check_broken_capture, 8},
};

}  // namespace pyringar::stress
