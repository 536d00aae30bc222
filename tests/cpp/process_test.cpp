// process_test: ranks of processes, run as threads: each has a group of its own on one segment, so
// that ThreadSanitizer sees what they share.

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <limits>
#include <thread>

#include "os/process.h"
#include "process/group.h"
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

// What processes would map: here one block at one address, or mapped once more for every rank.
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

// A rank: the group holds no memory of its own but a page, the segment is the test's.
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

// One call of all ranks.
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
  void check_untouched() const {
    for (const CallTensors& rank : tensors) check_unchanged(rank);
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

// What a rank's program does: all calls in order, some of them in the background.
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

// Random calls of random ranks, each compared with the oracle.
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
  CHECK(num_gone.load() == k, "somebody is missing");
  for (const Call& call : calls) call.check_done();
}

// Counters of messages at the end of their 32 bits, and `reduced` far behind `announced`.
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

// A rank calls something else: an error on all, nothing written, and nothing more from this group.
void process_mismatch_round(Random& random) {
  const SharedSegment shared = random_segment(random, 4);
  const int k = shared.world_size();
  const int odd = random.between(0, k - 1);
  const std::deque<Call> usual = random_calls(random, k, 1);
  Tensors others(random, DType::kInt32, static_cast<std::size_t>(k),
                 70'001);  // longer than any other
  on_all_ranks(k, [&](int rank) {
    const auto group = make_group(shared, rank, kLong);
    while (!group->absent_ranks().empty()) std::this_thread::yield();
    Collective call = usual[0].of_rank(rank);
    if (rank == odd) {
      call = {};
      call.reserve_local(1);
      call.add_local(others[rank], others[rank], others.numel(), DType::kInt32);
    }
    const std::string message = message_of(ErrorKind::kArgument, [&] { group->run(call); });
    CHECK(message.find(join("rank ", odd, " (process ", getpid())) != std::string::npos, message);
    check_throws(ErrorKind::kArgument, message, [&] { group->run(call); });
    // Nobody leaves while others still compare.
    while (!group->segment().failure().state.load()) std::this_thread::yield();
  });
  usual[0].check_untouched();
  others.check_unchanged();
}

// Ranks 0 and 1 are through with their parts and wait for rank 2, which is slow but moves, for
// longer than the timeout. Nobody is late then, rank 1 no more than rank 0.
void check_that_to_wait_is_not_to_be_late() {
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
  // Emulators of a processor show each thread another start of its process: nobody seems alive.
  const ProcessId self = this_process();
  bool is_seen = false;
  std::thread([&] { is_seen = is_alive(self); }).join();
  if (!is_seen) return;
  check_that_to_wait_is_not_to_be_late();
  // Another token.
  const SharedSegment shared(2, false);
  const Segment segment = shared.attach(0);
  auto* memory = reinterpret_cast<std::byte*>(&segment.line(0));
  check_throws(ErrorKind::kState, "another group's", [&] { Segment::attach(memory, 2, kToken); });
}

// The plainest account of where each byte of a flat view lies.
struct PlainView {
  std::vector<TensorSpan> tensors;
  std::deque<std::vector<std::byte>> memory;
  // By position: which byte of which tensor, null in the gaps; and its dtype.
  std::vector<std::byte*> bytes;
  std::vector<DType> dtypes;

  explicit PlainView(Random& random) {
    for (int i = random.one_in(4) ? 0 : random.between(1, 12); i > 0; --i) {
      const bool is_alike = random.one_in(2) && !tensors.empty();
      add(is_alike ? tensors.back().dtype : random_dtype(random),
          random.one_in(4) ? 0 : random.below(200));
    }
  }
  Collective call() const {
    Collective made;
    made.reserve_local(tensors.size());
    for (const TensorSpan& t : tensors) made.add_local(t.data, t.data, t.numel, t.dtype);
    return made;
  }
  void add(DType dtype, std::size_t numel) {
    memory.emplace_back(numel * item_bytes(dtype) + 1);
    tensors.push_back({memory.back().data(), numel, dtype});
    if (numel == 0) return;
    while (bytes.size() % FlatView::kAlignment != 0) {
      bytes.push_back(nullptr);
      dtypes.push_back(dtype);
    }
    for (std::size_t b = 0; b < tensors.back().bytes(); ++b) {
      bytes.push_back(tensors.back().data + b);
      dtypes.push_back(dtype);
    }
  }
};

void flat_view_round(Random& random) {
  const PlainView plain(random);
  const std::vector<std::byte*>& bytes = plain.bytes;
  FlatView line;
  line.view(plain.call());
  CHECK(line.bytes() == bytes.size(), line.bytes(), " bytes instead of ", bytes.size());

  const std::size_t piece = 64 * (1 + random.below(8));
  std::vector<std::byte*> visited(bytes.size(), nullptr);
  for (std::size_t begin = 0; begin < line.bytes(); begin += piece) {
    const std::size_t end = std::min(begin + piece, line.bytes());
    line.for_each(begin, end, [&](DType dtype, std::byte* data, std::size_t at, std::size_t n) {
      CHECK(n > 0 && n % item_bytes(dtype) == 0, "cut within an element");
      CHECK(begin + at + n <= end, "outside of its piece");
      for (std::size_t b = 0; b < n; ++b) {
        CHECK(plain.dtypes[begin + at + b] == dtype, "of another dtype");
        visited[begin + at + b] = data + b;
      }
    });
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    CHECK(visited[i] == bytes[i], "another byte at ", i);
  }
}

const Part kFlatView("flat-view", &flat_view_round);
const Part kProcesses("processes", &processes_round);
const Part kCounters("counters", &process_counters_round);
const Part kMismatch("mismatch", &process_mismatch_round);
const Part kFailures("failures", &process_failures_round, 10);

}  // namespace

}  // namespace pyringar::stress
