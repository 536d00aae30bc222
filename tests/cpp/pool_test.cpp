// pool_test: flags and waits, the thread pool, fused reductions, and the work queue.

#include <atomic>
#include <new>
#include <thread>

#include "core/ring_program.h"
#include "cpu/fused.h"
#include "oracle.h"
#include "os/call_lock.h"
#include "os/thread_pool.h"
#include "os/wait.h"
#include "os/work_queue.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

using std::chrono::milliseconds;

// Two threads alternately increment a plain counter. The flags' values wrap meanwhile.
void play_ping_pong(Random& random) {
  constexpr std::uint32_t kRallies = 60;
  const auto start = static_cast<std::uint32_t>(0) - static_cast<std::uint32_t>(random.below(100));
  Flag ping, pong;
  ping.value = pong.value = start;
  std::uint32_t ball = 0;  // not atomic: the flags order all accesses
  Random other = random.fork();
  std::thread player([&] {
    for (std::uint32_t rally = 1; rally <= kRallies; ++rally) {
      wait_for_flag(ping, start + rally);
      CHECK(ball == 2 * rally - 1, "the ball is at ", ball, " in rally ", rally);
      ++ball;
      dawdle(other);
      pong.set(start + rally);
    }
  });
  for (std::uint32_t rally = 1; rally <= kRallies; ++rally) {
    ++ball;
    dawdle(random);
    ping.set(start + rally);
    const auto never = [] { return false; };
    CHECK(try_for_flag(pong, start + rally) || nap_for_flag(pong, start + rally, kLong, never),
          rally);
    CHECK(ball == 2 * rally, "the ball is at ", ball, " after rally ", rally);
  }
  player.join();
}

// give_up() is called after each nap, not before. Its exception propagates; no thread stays asleep.
void give_up_waiting(Random& random) {
  Flag flag;
  const auto nap = milliseconds(random.between(0, 3));
  const int naps = random.between(1, 4);
  const bool throws = random.one_in(2);
  int asked = 0;
  const Stopwatch watch;
  const auto give_up = [&] {
    if (++asked == naps && throws) fail(ErrorKind::kState, "enough");
    return asked == naps;
  };
  if (throws) {
    check_throws(ErrorKind::kState, "enough", [&] { nap_for_flag(flag, 1, nap, give_up); });
  } else {
    CHECK(!nap_for_flag(flag, 1, nap, give_up), "no thread set the flag");
  }
  const double least = 1e-3 * static_cast<double>(nap.count() * naps);
  CHECK(watch.seconds() >= least, naps, " naps took ", watch.seconds(), " s, expected ", least);
  CHECK(flag.sleepers.load() == 0, flag.sleepers.load(), " sleepers left");
}

void wake_many(Random& random) {
  Flag flag;
  const int waiters = random.between(2, 6);
  std::uint32_t payload = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < waiters; ++i) {
    threads.emplace_back([&] {
      wait_for_flag(flag, 7);
      CHECK(payload == 42, "payload ", payload, " behind the flag");
    });
  }
  std::this_thread::sleep_for(std::chrono::microseconds(random.below(1000)));
  for (std::uint32_t n = 1; n <= 7; ++n) {
    if (n == 7) payload = 42;
    flag.set(n);
    dawdle(random);
  }
  for (std::thread& thread : threads) thread.join();
}

// Each item of a job runs exactly once before run() returns.
void run_job(Random& random, ThreadPool& pool) {
  std::vector<std::uint32_t> items(random.below(200), 0);  // not atomic: one thread per item
  std::atomic<std::size_t> next{0};
  const auto work = [&](int) {
    while (true) {
      const std::size_t item = next.fetch_add(1);
      if (item >= items.size()) return;
      items[item] += static_cast<std::uint32_t>(item) + 1;
    }
  };
  pool.run(work, random.below(5));
  for (std::size_t i = 0; i < items.size(); ++i) {
    CHECK(items[i] == i + 1, "item ", i, " of ", items.size(), " holds ", items[i]);
  }
}

// If work() throws on several threads, run() throws once; the pool stays usable.
void run_failing_job(Random& random, ThreadPool& pool) {
  std::atomic<int> inside{0};
  const auto work = [&](int) {
    ++inside;
    std::this_thread::sleep_for(milliseconds(1));  // gives helpers time to join
    --inside;
    throw std::bad_alloc();
  };
  bool has_thrown = false;
  try {
    pool.run(work, random.below(5));
  } catch (const std::bad_alloc&) {
    has_thrown = true;
  }
  CHECK(has_thrown, "the error is lost");
  CHECK(inside == 0, inside.load(), " threads are still in the job");
}

struct Job {
  std::vector<Tensors> tensors;
  std::vector<Buffers> buffers;
};

Job random_job(Random& random, int world_size) {
  Job job;
  const bool large = world_size <= 4 && random.one_in(2);
  const int count = random.between(0, large ? 5 : 12);
  const DType dtype = random_dtype(random);
  for (int i = 0; i < count; ++i) {
    const DType each = large ? dtype : random_dtype(random);
    const std::size_t block_elems = kMaxBlockBytes / item_bytes(each);
    const std::size_t numel = large && i == 0
                                  ? 4 * block_elems + random.below(9)
                                  : random_numel(random, large ? 2 * block_elems : 3000);
    job.tensors.emplace_back(random, each, static_cast<std::size_t>(world_size), numel);
  }
  for (const Tensors& t : job.tensors) {
    job.buffers.push_back(t.buffers());
  }
  return job;
}

void waits_round(Random& random) {
  play_ping_pong(random);
  give_up_waiting(random);
  wake_many(random);
}

void pool_round(Random& random) {
  ThreadPool pool(random.between(0, 3));
  const int jobs = random.between(0, 60);
  for (int i = 0; i < jobs; ++i) {
    run_job(random, pool);
    if (random.one_in(8)) run_failing_job(random, pool);
    dawdle(random);
  }
  // A second thread runs a job. The destructor may run while helper threads still wake up.
  if (random.one_in(2)) {
    std::thread other([&] { run_job(random, pool); });
    other.join();
  }
}

void fused_round(Random& random) {
  ThreadPool pool(random.between(0, 3));
  const int world_size = random.one_in(4) ? random.between(1, 20) : random.between(1, 4);
  const Fold fold = random_fold(random, world_size);
  Job job = random_job(random, world_size);
  run_fused(job.buffers, fold, pool,
            random.one_in(2) ? CallMode::kBlocking : CallMode::kBackground);
  for (const Tensors& t : job.tensors) t.check_all_reduced(fold, false, "fused");
}

struct Interruption {};

// After an interrupted close() the queue refuses new jobs, runs queued jobs, and can be closed.
void queue_round(Random& random) {
  CallLock call_lock;
  WorkQueue queue(call_lock);
  std::atomic<bool> may_end{false};
  const auto slow = queue.submit(
      [&] {
        const CallLock::Held held = call_lock.acquire(&ignore_naps);
        while (!may_end.load()) std::this_thread::yield();
      },
      nullptr);
  const auto later = queue.submit([&] { dawdle(random); }, nullptr);
  bool is_interrupted = false;
  try {
    queue.close([] { throw Interruption{}; });
  } catch (const Interruption&) {
    is_interrupted = true;
  }
  CHECK(is_interrupted, "close() ignored the exception");
  CHECK(!slow->is_completed(), "the slow job has not ended");
  check_throws(ErrorKind::kState, "closed", [&] { queue.submit([] {}, nullptr); });
  may_end = true;
  queue.close(&ignore_naps);
  CHECK(slow->is_completed() && later->is_completed(), "a submitted job has not run");
}

const Part kWaits("waits", &waits_round);
const Part kQueue("queue", &queue_round, 10);
const Part kPool("pool", &pool_round);
const Part kFused("fused", &fused_round);

}  // namespace

}  // namespace pyringar::stress
