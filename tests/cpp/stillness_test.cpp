// stillness_test: which ranks are late, and when, on a simulated clock.
#include "os/stillness.h"

#include <vector>

#include "stress.h"

namespace pyringar::stress {

namespace {

using std::chrono::milliseconds;

// Simulated ranks and a simulated clock; rank 0 calls look().
class Scene {
 public:
  Scene(int world_size, milliseconds timeout)
      : marks_(static_cast<std::size_t>(world_size), 7), stillness_(world_size, timeout) {}

  const Stillness& stillness() const { return stillness_; }
  void excuse(int rank) { stillness_.excuse(rank); }
  void move(int rank) { ++marks_[static_cast<std::size_t>(rank)]; }
  void look_after(std::chrono::nanoseconds time) {
    now_ += time;
    stillness_.look(0, [this](int rank) { return marks_[static_cast<std::size_t>(rank)]; }, now_);
  }
  // Call look() at each nap for `time`; rank `moving` progresses before each call (-1: no rank).
  void watch(std::chrono::nanoseconds time, int moving) {
    for (std::chrono::nanoseconds passed{}; passed < time; passed += stillness_.nap()) {
      if (moving >= 0) move(moving);
      look_after(stillness_.nap());
    }
  }

 private:
  std::vector<std::uint64_t> marks_;
  Stillness stillness_;
  Clock::time_point now_{std::chrono::hours(1)};
};

void stillness_round(Random& random) {
  const auto timeout = milliseconds(random.between(4, 3000));
  Scene scene(3, timeout);
  const Stillness& stillness = scene.stillness();

  // A rank that progresses is never late. A rank that does not is late after the timeout.
  scene.look_after(milliseconds(0));
  scene.watch(timeout - stillness.nap(), 1);
  CHECK(!stillness.is_late(2), "late after less than ", timeout.count(), " ms");
  scene.watch(stillness.nap() + stillness.nap(), 1);
  CHECK(stillness.is_late(2) && !stillness.is_late(1), "only rank 2 makes no progress");
  CHECK(!stillness.all_are_late(), "rank 1 moves");
  scene.watch(20 * timeout, 1);
  CHECK(!stillness.is_late(1) && stillness.still(1) == milliseconds(0), "rank 1 moves");

  scene.excuse(2);
  scene.watch(timeout - stillness.nap(), 1);
  CHECK(!stillness.is_late(2), "rank 2 was excused");
  scene.watch(stillness.nap() + stillness.nap(), 1);
  CHECK(stillness.is_late(2), "rank 2 makes no progress");

  // Progress of the calling rank restarts the timeouts of all ranks.
  scene.move(0);
  scene.look_after(stillness.nap());
  CHECK(!stillness.is_late(2), "rank 2 has had no time since rank 0 moved");

  // A long time between two look() calls counts as two naps: the machine may have slept.
  scene.look_after(100 * timeout + std::chrono::hours(random.between(0, 3)));
  CHECK(!stillness.is_late(1) && !stillness.is_late(2), "late in ", timeout.count(), " ms asleep");
  scene.watch(timeout, -1);
  CHECK(stillness.all_are_late(), "no rank progresses");
}

const Part kStillness("stillness", &stillness_round);

}  // namespace

}  // namespace pyringar::stress
