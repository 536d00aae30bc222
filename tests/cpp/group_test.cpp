// group_test: collectives through a Group: mixed back to back, from several threads, queued and
// closed, and without memory.

#include "cpu/group.h"

#include <sys/resource.h>
#include <unistd.h>

#include <deque>
#include <fstream>

#include "oracle.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

// Sanitizers need address space without end.
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

// Several tensors of every rank, and one all-reduce of all of them.
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

// Leaves room for this much more; returns the limit that held before.
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

void delay_somebody(Random& random, Group& group) {
  if (!random.one_in(3)) return;
  group.delay_rank(random.between(0, group.world_size() - 1),
                   std::chrono::microseconds(random.below(2000)));
}

void run_some(Random& random, Group& group, int calls) {
  for (int i = 0; i < calls; ++i) {
    const Call call(random, group.world_size());
    delay_somebody(random, group);
    if (random.one_in(2)) {
      group.run(call.collective());
    } else if (!group.try_run(call.collective())) {
      call.check_untouched();
      continue;
    }
    call.check_done();
  }
}

// Reduce-scatter and all-gather without a ring: reductions with one destination, or one source.
void run_scatter_and_gather(Random& random, Group& group) {
  const int k = group.world_size();
  const auto ranks = static_cast<std::size_t>(k);
  const DType dtype = random_dtype(random);
  const std::size_t chunk_bytes = random_numel(random, 3000) * item_bytes(dtype);
  const std::size_t chunk_elems = chunk_bytes / item_bytes(dtype);
  const Tensors wholes(random, dtype, ranks, chunk_elems * ranks);
  const Tensors chunks(random, dtype, ranks, chunk_elems);
  const Tensors gathered(random, dtype, ranks, chunk_elems * ranks);
  const auto at_chunk = [&](void* whole, std::size_t chunk) -> void* {
    return static_cast<std::byte*>(whole) + chunk * chunk_bytes;
  };
  Collective scatter, gather;
  scatter.algorithm = gather.algorithm = random.one_in(2) ? Algorithm::kFused : Algorithm::kDirect;
  scatter.pointers.reserve(ranks * ranks);
  gather.pointers.reserve(ranks * ranks);
  for (std::size_t chunk = 0; chunk < ranks; ++chunk) {
    void* const* sources = scatter.pointers.data() + scatter.pointers.size();
    void* const* destinations = gather.pointers.data() + gather.pointers.size();
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      scatter.pointers.push_back(at_chunk(wholes.pointers()[rank], chunk));
      gather.pointers.push_back(at_chunk(gathered.pointers()[rank], chunk));
    }
    scatter.tensors.push_back({sources, chunks.pointers() + chunk, k, 1, chunk_elems, dtype});
    gather.tensors.push_back({chunks.pointers() + chunk, destinations, 1, k, chunk_elems, dtype});
  }
  group.run(scatter);
  wholes.check_unchanged();
  group.run(gather);

  const std::vector<std::byte> expected =
      expected_reduction(dtype, Fold{}, wholes.before(), chunk_elems * ranks, false);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    check_same(dtype, chunks[rank], expected.data() + rank * chunk_bytes, chunk_elems,
               "reduce_scatter");
    check_same(dtype, gathered[rank], expected.data(), chunk_elems * ranks, "all_gather");
  }
}

// Submits until it has enough or the group is closed; what was accepted must be done, and right.
struct Submitted {
  std::unique_ptr<Call> call;
  std::shared_ptr<Work> work;
};

class Jobs {
 public:
  void add(Submitted job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_one();
  }
  void finish() {
    const std::lock_guard<std::mutex> lock(mutex_);
    finished_ = true;
    changed_.notify_all();
  }
  bool take(Submitted& job) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return finished_ || !jobs_.empty(); });
    if (jobs_.empty()) return false;
    job = std::move(jobs_.front());
    jobs_.pop_front();
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Submitted> jobs_;
  bool finished_ = false;
};

// False: the group was closed before it took the call, which is untouched then.
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

void submit_some(Random random, Group& group, Jobs& jobs) {
  for (int i = random.between(1, 10); i > 0; --i) {
    auto call = std::make_unique<Call>(random, group.world_size(), 3000);
    std::shared_ptr<Work> work;
    if (!ask(*call, [&](Collective c) { work = group.submit(std::move(c)); })) return;
    jobs.add({std::move(call), std::move(work)});
    dawdle(random);
  }
}

void wait_for_some(Jobs& jobs) {
  Submitted job;
  while (jobs.take(job)) {
    CHECK(job.work->wait(kLong), "not done after minutes");
    CHECK(job.work->is_completed() && !job.work->exception(), "done, and not");
    job.call->check_done();
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
  run_scatter_and_gather(random, group);
  const GroupStats stats = group.stats();
  std::uint64_t counted = 0;
  for (const std::uint64_t n : stats.calls) counted += n;
  CHECK(counted >= 2, counted, " calls counted");
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
  Jobs jobs;
  std::vector<std::thread> submitters, waiters;
  for (int i = 0; i < 3; ++i) {
    submitters.emplace_back(submit_some, random.fork(), std::ref(group), std::ref(jobs));
  }
  for (int i = 0; i < 2; ++i) waiters.emplace_back(wait_for_some, std::ref(jobs));
  std::thread runner(run_between, random.fork(), std::ref(group));
  std::thread closer;
  if (random.one_in(2)) {
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(3000)));
    group.close();  // while some work waits and some is still being submitted
    closer = std::thread([&] { group.close(); });
  }
  for (std::thread& submitter : submitters) submitter.join();
  runner.join();
  jobs.finish();
  for (std::thread& waiter : waiters) waiter.join();
  if (closer.joinable()) closer.join();
}

// In a process that has memory for some threads' stacks, but not for all ranks': an error or, if
// the stacks fit after all, the sum; and the sum once there is room.
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
      // Which one depends on what did not fit: a thread, or memory.
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
