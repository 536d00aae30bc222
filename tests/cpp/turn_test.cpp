// turn_test: one thread at a time has the turn; waits for it nap, end and are refused.

#include <atomic>
#include <thread>
#include <vector>

#include "os/turn.h"
#include "os/work_queue.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

struct Interruption {};

// Threads count on a plain number; some of them give up waiting.
void count_in_turns(Random& random) {
  Turn turn;
  std::uint64_t count = 0;  // plain: the turn orders who touches it
  std::atomic<std::uint64_t> taken{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < random.between(1, 5); ++t) {
    threads.emplace_back([&, own = random.fork()]() mutable {
      for (int i = 0; i < 50; ++i) {
        const Turn::Held held =
            own.one_in(3) ? Turn::Held(turn, std::try_to_lock) : turn.take(&ignore_naps);
        if (!held.owns_lock()) continue;
        CHECK(turn.is_mine(), "the turn is not mine");
        ++count;
        taken.fetch_add(1);
        dawdle(own);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(count == taken.load(), count, " of ", taken.load());
  CHECK(!turn.is_mine(), "the turn is still mine");
}

void interrupt_a_wait(Random&) {
  Turn turn;
  std::atomic<bool> is_interrupted{false};
  Turn::Held held = turn.take(&ignore_naps);
  check_throws(ErrorKind::kState, "a signal handler", [&] { turn.take(&ignore_naps); });
  std::thread other([&] {
    try {
      turn.take([] { throw Interruption{}; });
    } catch (const Interruption&) {
      is_interrupted = true;
    }
  });
  other.join();
  CHECK(is_interrupted.load(), "the wait went on");
  held.unlock();
  CHECK(turn.try_lock(), "who gave up has left it taken");
  turn.unlock();
}

// A queue's close() that is interrupted takes nothing new, does what it has, and can be repeated.
void interrupt_a_close(Random& random) {
  Turn turn;
  WorkQueue queue(turn);
  std::atomic<bool> may_end{false};
  const auto slow = queue.submit(
      [&] {
        const Turn::Held held = turn.take(&ignore_naps);
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
  CHECK(is_interrupted, "close() went on");
  CHECK(!slow->is_completed(), "nobody has let it end");
  check_throws(ErrorKind::kState, "closed", [&] { queue.submit([] {}, nullptr); });
  may_end = true;
  queue.close(&ignore_naps);
  CHECK(slow->is_completed() && later->is_completed(), "something has not run");
}

void turn_round(Random& random) {
  count_in_turns(random);
  if (!random.one_in(10)) return;
  interrupt_a_wait(random);
  interrupt_a_close(random);
}

const Part kTurn("turn", &turn_round);

}  // namespace

}  // namespace pyringar::stress
