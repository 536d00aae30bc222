// program_test: the ring program run symbolically. Slots hold parcels that say which message they
// are, of which elements, added up from which ranks; so it is the order of events that is tested,
// not arithmetic. tests/cpp/model tries every order, and engines with bugs.
//
// Source    flags, links' counters and waits are the real ones (os/wait.h, cpu/rank_team.h).

#include <array>
#include <atomic>

#include "core/ring_program.h"
#include "cpu/rank_team.h"
#include "oracle.h"
#include "os/wait.h"
#include "parts.h"

namespace pyringar::stress {

namespace {

constexpr int kMostRanks = 17;

// Plain integers: ThreadSanitizer judges every access.
struct Parcel {
  std::uint32_t message = 0;
  Range range{};
  std::size_t num_ranks = 0;
  std::array<int, kMostRanks> ranks{};
};

struct ParcelLink {
  Flag flag;
  Flag taken;
  std::vector<Parcel> slots;
};

struct ParcelRing {
  explicit ParcelRing(int world_size, std::uint32_t base = 0)
      : links(static_cast<std::size_t>(world_size)), messages(base) {
    for (ParcelLink& link : links) {
      link.slots = std::vector<Parcel>(ring_num_slots(world_size));
      link.flag.value = link.taken.value = base;
    }
  }
  int world_size() const { return static_cast<int>(links.size()); }
  ParcelLink& link(int rank) { return links[static_cast<std::size_t>(rank)]; }

  std::vector<ParcelLink> links;
  std::uint32_t messages;
};

using Contributions = std::vector<int>;

// What a rank did: the contributions inside each element it kept, and the first thing that was
// wrong.
struct Diary {
  std::vector<std::vector<Contributions>> kept;  // per element, once per time it was kept
  std::string complaint;
};

// A planted race: slots are given back before they are read.
enum class Bug { kNone, kFreesBeforeReading };

template <Bug bug>
class ParcelEngine {
 public:
  ParcelEngine(const RingProgram& program, ParcelRing& ring, Watch& watch, Random random,
               Diary& diary)
      : program_(program),
        in_(ring.link((program.rank + ring.world_size() - 1) % ring.world_size())),
        out_(ring.link(program.rank)),
        num_slots_(ring_num_slots(ring.world_size())),
        watch_(watch),
        random_(random),
        diary_(diary) {
    diary_.kept.resize(program.numel);
  }

  bool wait_message(std::uint32_t n, int) {
    dawdle(random_);
    if (!wait(in_.flag, n)) return false;
    if (bug == Bug::kFreesBeforeReading) {
      in_.taken.set(n);
      // Long enough for the writer to run into the mistake.
      if (random_.one_in(8)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
  }
  bool wait_slot(std::uint32_t n, int) {
    dawdle(random_);
    return wait(out_.taken, n - num_slots_);
  }
  void publish(std::uint32_t n) {
    dawdle(random_);
    out_.flag.set(n);
  }
  void free_message(std::uint32_t n) {
    dawdle(random_);
    if (bug != Bug::kFreesBeforeReading) in_.taken.set(n);
  }

  void send_own(Range range, std::uint32_t n) { send(range, {program_.rank}, n); }
  void reduce_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    send(range, with_own(receive(range, n_in)), n_out);
  }
  void reduce_finish(Range range, std::uint32_t n_in) {
    keep(range, with_own(receive(range, n_in)));
  }
  void reduce_finish_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    const Contributions sum = with_own(receive(range, n_in));
    keep(range, sum);
    send(range, sum, n_out);
  }
  void gather_own(Range range, std::uint32_t n) {
    keep(range, {program_.rank});
    send(range, {program_.rank}, n);
  }
  void copy_forward(Range range, std::uint32_t n_in, std::uint32_t n_out) {
    const Contributions result = receive(range, n_in);
    keep(range, result);
    send(range, result, n_out);
  }
  void copy_last(Range range, std::uint32_t n_in) { keep(range, receive(range, n_in)); }

 private:
  bool wait(Flag& flag, std::uint32_t wanted) {
    return watch_.wait(program_.rank, flag, wanted, wanted, [&] {
      return join("rank ", program_.rank, " waited for ", wanted, " at ", flag.value.load());
    });
  }
  Parcel& slot(ParcelLink& link, std::uint32_t n) const { return link.slots[n % num_slots_]; }
  Contributions with_own(Contributions partial) const {
    partial.push_back(program_.rank);
    return partial;
  }
  void send(Range range, const Contributions& ranks, std::uint32_t n) {
    Parcel& parcel = slot(out_, n);
    parcel.message = n;
    parcel.range = range;
    dawdle(random_);
    parcel.num_ranks = std::min<std::size_t>(ranks.size(), kMostRanks);
    std::copy_n(ranks.begin(), parcel.num_ranks, parcel.ranks.begin());
  }
  Contributions receive(Range range, std::uint32_t n) {
    const Parcel& parcel = slot(in_, n);
    const bool is_right =
        parcel.message == n && parcel.range.begin == range.begin && parcel.range.end == range.end;
    dawdle(random_);
    const Contributions ranks(
        parcel.ranks.begin(),
        parcel.ranks.begin() + std::min<std::size_t>(parcel.num_ranks, kMostRanks));
    if ((!is_right || parcel.message != n) && diary_.complaint.empty()) {
      diary_.complaint =
          join("rank ", program_.rank, " expected message ", n, " [", range.begin, ", ", range.end,
               "), found ", parcel.message, " [", parcel.range.begin, ", ", parcel.range.end, ")");
    }
    return ranks;
  }
  void keep(Range range, const Contributions& ranks) {
    for (std::size_t i = range.begin; i < range.end; ++i) diary_.kept[i].push_back(ranks);
  }

  const RingProgram& program_;
  ParcelLink& in_;
  ParcelLink& out_;
  const std::uint32_t num_slots_;
  Watch& watch_;
  Random random_;
  Diary& diary_;
};

std::string show(const std::vector<Contributions>& kept) {
  std::string text = join(kept.size(), " times");
  for (const Contributions& ranks : kept) {
    text += ", from";
    for (const int rank : ranks) text += join(" ", rank);
  }
  return text;
}

// "" when rank `diary` belongs to kept just what it should, added in the promised order.
std::string complaint_of(const Diary& diary, const RingProgram& program) {
  if (!diary.complaint.empty()) return diary.complaint;
  const int k = program.world_size;
  for (int chunk = 0; chunk < k; ++chunk) {
    std::vector<Contributions> expected;
    if (program.phases == RingPhases::kAllGather) {
      expected = {{chunk}};
    } else if (program.phases == RingPhases::kAllReduce || chunk == program.rank) {
      expected = {ring_order(k, chunk)};
    }
    const Range range = chunk_range(program.numel, k, chunk);
    for (std::size_t i = range.begin; i < range.end; ++i) {
      if (diary.kept[i] == expected) continue;
      return join("rank ", program.rank, ", element ", i, " of ", program.numel, ", chunk ", chunk,
                  " kept ", show(diary.kept[i]), "; expected ", show(expected));
    }
  }
  return "";
}

// One collective on all ranks. "" or what went wrong first.
template <Bug bug>
std::string run_parcels(Random& random, ParcelRing& ring, RingProgram program,
                        std::chrono::milliseconds timeout) {
  const int k = ring.world_size();
  Watch watch(k, timeout);
  std::vector<Diary> diaries(static_cast<std::size_t>(k));
  const std::vector<Random> randoms = random.forks(k);
  std::atomic<int> returned{0};
  program.world_size = k;
  program.base = ring.messages;
  on_all_ranks(k, [&](int rank) {
    RingProgram own = program;
    own.rank = rank;
    const auto at = static_cast<std::size_t>(rank);
    ParcelEngine<bug> engine(own, ring, watch, randoms[at], diaries[at]);
    if (run_ring(engine, own)) ++returned;
  });
  ring.messages += ring_num_messages(program);
  if (returned < k) return watch.failure();
  for (int rank = 0; rank < k; ++rank) {
    program.rank = rank;
    std::string complaint = complaint_of(diaries[static_cast<std::size_t>(rank)], program);
    if (!complaint.empty()) return complaint;
  }
  for (const ParcelLink& link : ring.links) {
    if (link.flag.value != ring.messages || link.taken.value != ring.messages) {
      return join("a link carried ", link.flag.value.load(), " messages, ", link.taken.value.load(),
                  " taken, expected ", ring.messages);
    }
  }
  return "";
}

RingProgram random_program(Random& random) {
  RingProgram program{};
  program.numel = random.one_in(4) ? random.below(4) : random.below(120);
  program.piece_elems = 1 + random.below(random.one_in(2) ? 3 : 40);
  program.phases = static_cast<RingPhases>(random.below(3));
  return program;
}

}  // namespace

void program_round(Random& random) {
  const int world_size = random.one_in(8) ? random.between(1, kMostRanks) : random.between(1, 6);
  // Counters start anywhere, often just before they wrap.
  const std::uint32_t base = random.one_in(2) ? static_cast<std::uint32_t>(0) -
                                                    static_cast<std::uint32_t>(random.below(100))
                                              : static_cast<std::uint32_t>(random.bits());
  ParcelRing ring(world_size, base);
  const int calls = random.between(1, 4);
  for (int call = 0; call < calls; ++call) {
    const RingProgram program = random_program(random);
    const std::string complaint =
        run_parcels<Bug::kNone>(random, ring, program, std::chrono::milliseconds(100'000));
    CHECK(complaint.empty(), "call ", call, ", k = ", world_size, ", ", program.numel,
          " elements in pieces of ", program.piece_elems, ", phases ",
          static_cast<int>(program.phases), ": ", complaint);
  }
}

void run_planted_race() {
  Random random(1);
  for (int i = 0; i < 20; ++i) {
    ParcelRing ring(4);
    RingProgram program{};
    program.numel = 300;
    program.piece_elems = 3;
    program.phases = RingPhases::kAllReduce;
    run_parcels<Bug::kFreesBeforeReading>(random, ring, program, std::chrono::milliseconds(2000));
  }
}

}  // namespace pyringar::stress
