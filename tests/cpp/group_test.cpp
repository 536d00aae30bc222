// group_test: blocking and submitted collectives of a Group, from several threads; low memory.
#include "cpu/group.h"

#include <sys/resource.h>
#include <unistd.h>

#include <deque>
#include <fstream>

#include "oracle.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif
#else
constexpr bool kSanitized = false;
#endif

Algorithm random_algorithm(Random& random) {
  return static_cast<Algorithm>(random.below(kNumAlgorithms));
}

class Call {
 public:
  Call(Random& random, int world_size, std::size_t most_elems = 20'000)
      : algorithm_(random_algorithm(random)), fold_(random_fold(random, world_size)) {
    for (int i = random.between(1, 4); i > 0; --i) {
      tensors_.emplace_back(random, random_dtype(random), static_cast<std::size_t>(world_size),
                            random_numel(random, most_elems));
    }
  }

  Algorithm algorithm() const { return algorithm_; }
  Collective collective() const {
    Collective made;
    made.algorithm = algorithm_;
    made.fold = fold_;
    for (const Tensors& t : tensors_) {
      made.bytes += t.bytes();
      made.tensors.push_back(t.buffers());
    }
    return made;
  }
  void check_done() const {
    for (const Tensors& t : tensors_) {
      t.check_all_reduced(fold_, algorithm_ == Algorithm::kRing, algorithm_name(algorithm_));
    }
  }
  void check_untouched() const {
    for (const Tensors& t : tensors_) t.check_unchanged();
  }

 private:
  Algorithm algorithm_;
  Fold fold_;
  std::deque<Tensors> tensors_;
};

void submit_and_wait(Group& group, const Call& call) {
  CHECK(group.submit(call.collective())->wait(kLong), "not done after minutes");
}

// Limit the address space to `room` more bytes; return the old limit.
rlimit limit_memory_bytes(std::size_t room) {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit before{};
  getrlimit(RLIMIT_AS, &before);
  rlimit limited = before;
  limited.rlim_cur = pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + room;
  if (pages > 0 && !kSanitized) setrlimit(RLIMIT_AS, &limited);
  return before;
}

void delay_random_rank(Random& random, Group& group) {
  if (!random.one_in(3)) return;
  group.delay_rank(random.between(0, group.world_size() - 1),
                   std::chrono::microseconds(random.below(2000)));
}

void run_some(Random& random, Group& group, int calls) {
  for (int i = 0; i < calls; ++i) {
    const Call call(random, group.world_size());
    delay_random_rank(random, group);
    if (random.one_in(2)) {
      group.run(call.collective());
    } else if (!group.try_run(call.collective())) {
      call.check_untouched();
      continue;
    }
    call.check_done();
  }
}

// Return false, and check that tensors are unchanged, if the group was closed before the call.
template <typename Ask>
bool ask(const Call& call, Ask&& ask_group) {
  try {
    ask_group(call.collective());
    return true;
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kState, error.what());
    CHECK(std::string_view(error.what()).find("closed") != std::string_view::npos, error.what());
    call.check_untouched();
    return false;
  }
}

// Submit calls until the group is closed; all accepted calls must complete with correct results.
void submit_some(Random random, Group& group) {
  std::deque<std::pair<Call, std::shared_ptr<Work>>> jobs;
  for (int i = random.between(1, 10); i > 0; --i) {
    Call call(random, group.world_size(), 3000);
    std::shared_ptr<Work> work;
    if (!ask(call, [&](Collective c) { work = group.submit(std::move(c)); })) break;
    jobs.emplace_back(std::move(call), std::move(work));
    dawdle(random);
  }
  for (const auto& [call, work] : jobs) {
    CHECK(work->wait(kLong), "not done after minutes");
    CHECK(work->is_completed() && !work->exception(), "the work is not completed, or failed");
    call.check_done();
  }
}

void run_between(Random random, Group& group) {
  for (int i = random.between(0, 5); i > 0; --i) {
    const Call call(random, group.world_size(), 3000);
    bool done = true;
    const bool tries = random.one_in(2);
    const bool taken = ask(call, [&](Collective c) {
      if (tries) {
        done = group.try_run(c);
      } else {
        group.run(c);
      }
    });
    if (!taken) return;
    done ? call.check_done() : call.check_untouched();
  }
}

void group_round(Random& random) {
  const int world_size = random.one_in(8) ? random.between(2, 17) : random.between(2, 8);
  Group group(world_size, kLong);
  const int calls = random.between(0, 8);
  run_some(random, group, calls);
  const GroupStats stats = group.stats();
  std::uint64_t counted = 0;
  for (const std::uint64_t n : stats.calls) counted += n;
  CHECK(counted <= static_cast<std::uint64_t>(calls), counted, " of ", calls, " calls counted");
  if (random.one_in(2)) {
    group.close();
    group.close();
    check_throws(ErrorKind::kState, "closed",
                 [&] { group.run(Call(random, world_size).collective()); });
    check_throws(ErrorKind::kState, "closed",
                 [&] { group.submit(Call(random, world_size).collective()); });
  }
}

void async_round(Random& random) {
  Group group(random.between(2, 4), kLong);
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back(submit_some, random.fork(), std::ref(group));
  }
  threads.emplace_back(run_between, random.fork(), std::ref(group));
  if (random.one_in(2)) {
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
    group.close();  // close() while threads still submit
    threads.emplace_back([&] { group.close(); });
  }
  for (std::thread& thread : threads) thread.join();
}

// A call without memory for all ranks' stacks throws or succeeds; with memory it succeeds.
void no_threads_round(Random& random) {
  in_child([&] {
    const Call call(random, 8, 300);
    const Call again(random, 8, 300);
    Group group(8, kLong);
    const rlimit before = limit_memory_bytes(std::size_t{20} << 20);
    bool done = false;
    try {
      random.one_in(2) ? group.run(call.collective()) : submit_and_wait(group, call);
      done = true;
    } catch (const std::exception&) {
      // std::bad_alloc or Error: memory or a thread is missing.
    }
    setrlimit(RLIMIT_AS, &before);
    done ? call.check_done() : call.check_untouched();
    group.run(again.collective());
    again.check_done();
    group.close();
  });
}

const Part kGroup("group", &group_round);
const Part kAsync("async", &async_round);
const Part kNoThreads("no-threads", &no_threads_round, 10);

}  // namespace

}  // namespace pyringar::stress
