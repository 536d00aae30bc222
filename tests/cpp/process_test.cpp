// process_test: ranks of processes, run as threads on one segment for ThreadSanitizer.

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <limits>
#include <thread>

#include "os/process.h"
#include "process/process_group.h"
#include "process_calls.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

using std::chrono::milliseconds;

constexpr auto kTimeout = milliseconds(250);
constexpr SegmentToken kToken = {7, 1, 2};

struct Free {
  void operator()(std::byte* memory) const { std::free(memory); }
};

class SharedSegment {
 public:
  SharedSegment(int world_size, bool is_mapped) : world_size_(world_size) {
    const std::size_t bytes = Segment::bytes_for(world_size);
    if (is_mapped) {
      mapped_.push_back(SharedMemory::create(bytes, "a test"));
      for (int rank = 1; rank < world_size; ++rank) {
        mapped_.push_back(SharedMemory::open(static_cast<std::int32_t>(getpid()), mapped_[0].fd(),
                                             bytes, "a test"));
      }
    } else {
      plain_.reset(static_cast<std::byte*>(std::aligned_alloc(4096, bytes)));
    }
    Segment::lay_out(memory(0), world_size, kToken);
  }

  Segment attach(int rank) const { return Segment::attach(memory(rank), world_size_, kToken); }
  int world_size() const { return world_size_; }

 private:
  std::byte* memory(int rank) const {
    return plain_ ? plain_.get() : mapped_[static_cast<std::size_t>(rank)].data();
  }

  const int world_size_;
  std::unique_ptr<std::byte, Free> plain_;
  std::deque<SharedMemory> mapped_;
};

SharedSegment random_segment(Random& random, int most_ranks) {
  return {random.between(2, most_ranks), random.one_in(4)};
}

// The test owns the segment; the group only gets an unused page.
std::unique_ptr<ProcessGroup> make_group(const SharedSegment& shared, int rank,
                                         std::chrono::nanoseconds timeout) {
  return std::make_unique<ProcessGroup>(SharedMemory::create(1, "a test"), shared.attach(rank),
                                        rank, ProcessGroupOptions{timeout});
}

Case random_case(Random& random, int world_size) {
  const CallKind kind = random.one_in(2) ? CallKind::kAllReduce : random_kind(random);
  Case made{
      kind, random_fold(random, world_size), random.between(0, world_size - 1), {}, random.bits()};
  const int count = kind != CallKind::kAllReduce ? 1 : random.one_in(8) ? 60 : random.between(0, 4);
  for (int i = 0; i < count; ++i) {
    made.shapes.push_back({random_dtype(random), random_numel(random, count > 4 ? 200 : 60'000)});
  }
  return made;
}

struct Call {
  Call(Random& random, int world_size) : made(random_case(random, world_size)) {
    for (int rank = 0; rank < world_size; ++rank) {
      tensors.push_back(make_tensors(made, world_size, rank));
    }
  }

  Collective of_rank(int rank) const {
    return call_of(made, tensors[static_cast<std::size_t>(rank)], static_cast<int>(tensors.size()));
  }
  void check_done() const {
    std::vector<const CallTensors*> all;
    for (const CallTensors& rank : tensors) all.push_back(&rank);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      check_case(made, all, static_cast<int>(rank));
    }
  }

  Case made;
  std::deque<CallTensors> tensors;
};

std::deque<Call> random_calls(Random& random, int world_size, int count) {
  std::deque<Call> calls;
  for (int i = 0; i < count; ++i) calls.emplace_back(random, world_size);
  return calls;
}

void delay_somewhere(Random& random, ProcessGroup& group) {
  if (!random.one_in(6)) return;
  group.delay(static_cast<Phase>(random.below(kNumPhases)),
              std::chrono::microseconds(random.below(2000)));
}

void run_all(Random random, ProcessGroup& group, const std::deque<Call>& calls) {
  std::deque<std::shared_ptr<Work>> works;
  for (const Call& call : calls) {
    delay_somewhere(random, group);
    dawdle(random);
    if (random.one_in(3)) {
      works.push_back(group.submit(call.of_rank(group.rank())));
    } else {
      group.run(call.of_rank(group.rank()));
    }
  }
  for (const auto& work : works) CHECK(work->wait(kLong), "not done after minutes");
}

void processes_round(Random& random) {
  const SharedSegment shared = random_segment(random, 5);
  const int k = shared.world_size();
  const std::deque<Call> calls = random_calls(random, k, random.between(1, 8));
  const std::vector<Random> randoms = random.forks(k);
  std::atomic<int> num_gone{0};
  on_all_ranks(k, [&](int rank) {
    const auto group = make_group(shared, rank, kLong);
    while (!group->absent_ranks().empty()) std::this_thread::yield();
    run_all(randoms[static_cast<std::size_t>(rank)], *group, calls);
    const ProcessStats stats = group->stats();
    std::uint64_t counted = 0;
    for (const std::uint64_t n : stats.calls) counted += n;
    CHECK(counted == calls.size(), counted, " calls counted instead of ", calls.size());
    group->close();
    group->close();
    check_throws(ErrorKind::kState, "closed", [&] { group->run(calls[0].of_rank(rank)); });
    num_gone.fetch_add(1);
  });
  CHECK(num_gone.load() == k, num_gone.load(), " of ", k, " ranks closed");
  for (const Call& call : calls) call.check_done();
}

// Message counters wrap at 2^32, and `reduced` is far behind `announced`.
void process_counters_round(Random& random) {
  const SharedSegment shared = random_segment(random, 4);
  const int k = shared.world_size();
  const std::uint32_t start =
      std::numeric_limits<std::uint32_t>::max() - static_cast<std::uint32_t>(random.below(40));
  const std::uint32_t lag =
      random.one_in(2) ? 0 : 0x7fff'fff0u + static_cast<std::uint32_t>(random.below(32));
  for (int rank = 0; rank < k; ++rank) {
    RankLine& line = shared.attach(rank).line(rank);
    line.process = this_process();
    line.announced.value = start;
    line.reduced.value = start - lag;
    const Segment segment = shared.attach(rank);
    for (std::uint32_t i = 0; i < kStagingSlots; ++i) segment.head(rank, i).number = start;
  }
  const std::deque<Call> calls = random_calls(random, k, 6);
  const std::vector<Random> randoms = random.forks(k);
  on_all_ranks(k, [&](int rank) {
    const Segment segment = shared.attach(rank);
    PeerWatch watch(segment, rank, kLong);
    ProcessRank self{segment, rank, watch};
    self.messages = start;
    Random own = randoms[static_cast<std::size_t>(rank)];
    for (const Call& call : calls) {
      dawdle(own);
      const Collective of_rank = call.of_rank(rank);
      CHECK(run_process_call(of_rank, self, false), watch.failure());
    }
  });
  for (const Call& call : calls) call.check_done();
}

// Ranks 0 and 1 wait longer than the timeout for rank 2, which progresses. No rank is late.
void check_waiting_rank_is_not_late() {
  const SharedSegment shared(3, false);
  std::vector<std::unique_ptr<ProcessGroup>> joined;
  for (int rank = 0; rank < 3; ++rank) joined.push_back(make_group(shared, rank, kLong));
  const Segment segment = shared.attach(0);
  PeerWatch watch(segment, 0, kTimeout);
  Flag& slow = segment.line(2).reduced;
  for (int rank : {0, 1}) segment.line(rank).reduced.set(1, kWakeAll, Scope::kProcesses);
  const Stopwatch stopwatch;
  watch.set_on_nap([&] {
    segment.line(2).progress.fetch_add(1);
    if (stopwatch.seconds() > 0.4) slow.set(1, kWakeAll, Scope::kProcesses);
  });
  CHECK(watch.wait(slow, 1, 2, "to reduce"), watch.failure());
}

void process_failures_round(Random&) {
  // Under qemu each thread reads a different start time, so all processes seem dead.
  const ProcessId self = this_process();
  bool is_seen = false;
  std::thread([&] { is_seen = is_alive(self); }).join();
  if (!is_seen) return;
  check_waiting_rank_is_not_late();
}

const Part kProcesses("processes", &processes_round);
const Part kCounters("counters", &process_counters_round);
const Part kFailures("failures", &process_failures_round, 10);

}  // namespace

}  // namespace pyringar::stress
