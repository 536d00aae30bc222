// ring_test: ring_rank() on threads with random delays, wrapping counters, and an absent rank.
#include "cpu/ring.h"

#include <atomic>
#include <deque>

#include "oracle.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

using std::chrono::milliseconds;

struct RingCall {
  RingCall(Random& random, int world_size) : tensors(random_tensors(random, world_size)) {
    for (int rank = 0; rank < world_size; ++rank) {
      inputs.push_back(tensors.input(rank));
      outputs.push_back(tensors.output(rank));
    }
  }
  static RingTensors random_tensors(Random& random, int world_size) {
    Buffers shape{};
    shape.num_sources = world_size;
    shape.phases = static_cast<RingPhases>(random.below(3));
    shape.dtype = random_dtype(random);
    shape.numel = random_numel(random, 60'000);
    const bool gathers = shape.phases == RingPhases::kAllGather;
    const Fold fold = gathers ? Fold{} : random_fold(random, world_size);
    const bool in_place = shape.phases == RingPhases::kAllReduce;
    return {random, fold, shape, in_place, [](Random&) { return Addresses::kAnyByte; }};
  }
  Buffers buffers() const {
    const auto k = static_cast<int>(inputs.size());
    return {inputs.data(),   outputs.data(),  k, k, tensors.numel(),
            tensors.dtype(), tensors.phases()};
  }

  RingTensors tensors;
  std::vector<void*> inputs;
  std::vector<void*> outputs;
};

void start_at(RingLinks& ring, std::uint32_t base) {
  ring.messages = base;
  for (Link& link : ring.links) link.flag.value = link.taken.value = base;
}

std::uint32_t random_base(Random& random) {
  if (random.one_in(3)) return 0;
  return static_cast<std::uint32_t>(0) - static_cast<std::uint32_t>(random.below(200));
}

int random_world_size(Random& random) {
  return random.one_in(8) ? random.between(1, 13) : random.between(1, 5);
}

// Omit rank `absent`: the other ranks give up in time and name it. Return "" or an error.
template <typename Call>
std::string withhold(int world_size, int absent, const char* operation, Call&& call) {
  Watch watch(world_size, milliseconds(60));
  const Stopwatch stopwatch;
  std::atomic<int> gave_up{0};
  on_all_ranks(world_size, [&](int rank) {
    if (rank == absent) return;
    if (!call(rank, watch)) ++gave_up;
  });
  const double seconds = stopwatch.seconds();
  CHECK(gave_up == world_size - 1, gave_up.load(), " of ", world_size, " ranks gave up");
  CHECK(seconds >= 0.06, "gave up after ", seconds, " s");
  if (seconds > kGraceSeconds) return join("gave up after ", seconds, " s");
  const std::string failure = watch.failure();
  const std::string culprit = join("for rank ", absent, " ");
  if (failure.find(culprit) != std::string::npos && failure.find(operation) == 0) return "";
  return join("\"", failure, "\" does not say that ", operation, " waited ", culprit);
}

void ring_round(Random& random) {
  const int world_size = random_world_size(random);
  RingLinks ring(world_size);
  start_at(ring, random_base(random));
  std::deque<RingCall> calls;
  for (int i = random.between(1, 5); i > 0; --i) calls.emplace_back(random, world_size);
  std::vector<Random> randoms = random.forks(world_size);
  Watch watch(world_size, kLong);
  // No barrier between calls: fast ranks run ahead.
  on_all_ranks(world_size, [&](int rank) {
    std::uint32_t base = ring.messages;
    for (const RingCall& call : calls) {
      dawdle(randoms[static_cast<std::size_t>(rank)]);
      const Buffers buffers = call.buffers();
      CHECK(ring_rank(rank, buffers, call.tensors.fold(), ring, base, watch), watch.failure());
      base += ring_num_messages(ring_program(rank, buffers, ring, base));
    }
  });
  for (const RingCall& call : calls) call.tensors.check();
}

void withheld_round(Random& random) {
  const int world_size = random.between(2, 6);
  const int absent = random.between(0, world_size - 1);
  // With an absent rank, small tensors fail in the first step, large tensors when slots run out.
  const Tensors tensors(random, DType::kFloat32, static_cast<std::size_t>(world_size),
                        random.one_in(2) ? 100 : 1'000'000);
  const Buffers buffers = tensors.buffers();
  check_one_of_three([&] {
    RingLinks ring(world_size);
    start_at(ring, random_base(random));
    return withhold(world_size, absent, "ring", [&](int rank, Watch& watch) {
      return ring_rank(rank, buffers, Fold{}, ring, ring.messages, watch);
    });
  });
}

const Part kRing("ring", &ring_round);
const Part kWithheld("withheld", &withheld_round, 10);

}  // namespace

}  // namespace pyringar::stress
