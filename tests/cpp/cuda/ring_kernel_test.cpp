// ring_kernel_test: the ring kernel with ranks on one to three emulated devices. Repeated calls,
// counters that wrap, a missing rank.
#include "cuda/ring.cuh"

#include <algorithm>
#include <deque>

#include "emulated_kernels.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

using cuda::Awaited;
using cuda::Bytes16;
using cuda::Failure;
using cuda::kFlagStride;
using cuda::RingArgs;
using cuda::RingPorts;
using emulator::Launch;

constexpr std::uint64_t kLongNs = 600'000'000'000;
// Unused end of each slot, which holds canaries.
constexpr std::uint32_t kUnusedSlotBytes = 64;
constexpr std::uint32_t kCanaryWord = 0xa5a5a5a5;
constexpr std::uint32_t kSlotBytes = 320;
constexpr int kMostDevices = 3;

// Make flags with value `base`. The other words of their cache lines are zero, as in DeviceRing.
std::vector<std::uint32_t> flags_from(std::uint32_t base, std::size_t count) {
  std::vector<std::uint32_t> words(count * kFlagStride);
  for (std::size_t i = 0; i < words.size(); i += kFlagStride) words[i] = base;
  return words;
}

struct RingShape {
  int world_size;
  int num_channels;
};

std::size_t largest_piece(DType dtype) {
  return (kSlotBytes - kUnusedSlotBytes) / partial_bytes(dtype) - cuda::kSlotSpareElems;
}

struct KernelCall {
  KernelCall(Random& random, const RingShape& shape, std::size_t numel)
      : tensors(random_tensors(random, shape.world_size, numel)),
        num_channels(random.between(1, shape.num_channels)),
        num_threads(static_cast<unsigned>(random.between(1, 3))),
        piece_elems(largest_piece(tensors.dtype())) {
    if (random.one_in(3)) piece_elems = 1 + random.below(piece_elems);
  }
  static RingTensors random_tensors(Random& random, int world_size, std::size_t numel) {
    Buffers shape{};
    shape.num_sources = world_size;
    shape.phases = static_cast<RingPhases>(random.below(3));
    shape.dtype = random_dtype(random);
    shape.numel = numel;
    const bool gathers = shape.phases == RingPhases::kAllGather;
    const ReduceOp op = gathers ? ReduceOp::kSum : random_op(random);
    const Fold fold{op, op == ReduceOp::kMean ? world_size : 1};
    const bool in_place = shape.phases == RingPhases::kAllReduce && random.one_in(2);
    return {random, fold, shape, in_place, &random_addresses};
  }
  std::uint32_t num_messages(int world_size, int channel) const {
    return ring_num_messages({0, world_size, tensors.numel(), piece_elems, tensors.phases(), 0,
                              static_cast<std::size_t>(channel),
                              static_cast<std::size_t>(num_channels)});
  }

  RingTensors tensors;
  int num_channels;
  unsigned num_threads;
  std::size_t piece_elems;
};

// Random number of elements, mostly a few pieces per channel.
std::size_t random_size(Random& random, int world_size) {
  const auto k = static_cast<std::size_t>(world_size);
  if (random.one_in(4)) return random.below(2 * k);
  return random.below(k * (kSlotBytes / 4 + (random.one_in(4) ? 500 : 0)));
}

// Ranks on devices, linked as in cuda/device_ring.cpp.
class RingDevices {
 public:
  RingDevices(Random& random, const RingShape& shape, std::uint32_t base, std::uint64_t timeout_ns);

  RingArgs args(std::size_t device, const KernelCall& call, int withheld);
  std::size_t num_devices() const { return ranks_.size(); }
  const std::vector<int>& ranks(std::size_t device) const { return ranks_[device]; }
  const Failure& failure(std::size_t device) const { return failures_[device]; }
  void check_counters(int channel, std::uint32_t wanted) const;
  void check_slots() const;

 private:
  static std::size_t at(int channel) { return static_cast<std::size_t>(channel * kFlagStride); }
  RingPorts ports(int rank, const std::vector<int>& local);

  const int world_size_;
  const std::uint32_t num_slots_;
  const std::uint64_t timeout_ns_;
  std::vector<std::vector<int>> ranks_;            // ranks of each device, at least one
  std::vector<std::vector<Bytes16>> slots_;        // indexed by the rank that reads
  std::vector<std::vector<std::uint32_t>> flags_;  // indexed by the rank that reads
  std::vector<std::vector<std::uint32_t>> taken_;  // indexed by the rank that writes
  std::vector<std::vector<std::uint32_t>> bases_;  // by rank
  std::vector<std::vector<RingPorts>> ports_;      // by device
  std::vector<std::uint32_t> gave_up_;
  std::vector<Failure> failures_;
};

RingDevices::RingDevices(Random& random, const RingShape& shape, std::uint32_t base,
                         std::uint64_t timeout_ns)
    : world_size_(shape.world_size),
      num_slots_(ring_num_slots(shape.world_size)),
      timeout_ns_(timeout_ns) {
  ranks_.resize(static_cast<std::size_t>(random.between(1, kMostDevices)));
  const auto channels = static_cast<std::size_t>(shape.num_channels);
  const Bytes16 canary = {{kCanaryWord, kCanaryWord, kCanaryWord, kCanaryWord}};
  for (int rank = 0; rank < world_size_; ++rank) {
    ranks_[random.below(ranks_.size())].push_back(rank);
    slots_.emplace_back(channels * num_slots_ * kSlotBytes / sizeof(Bytes16), canary);
    for (auto* counters : {&flags_, &taken_, &bases_}) {
      counters->push_back(flags_from(base, channels));
    }
  }
  std::erase_if(ranks_, [](const std::vector<int>& ranks) { return ranks.empty(); });
  for (const std::vector<int>& ranks : ranks_) {
    ports_.emplace_back();
    for (const int rank : ranks) ports_.back().push_back(ports(rank, ranks));
  }
  gave_up_.resize(ranks_.size());
  failures_.resize(ranks_.size());
}

RingPorts RingDevices::ports(int r, const std::vector<int>& local) {
  const auto rank = static_cast<std::size_t>(r);
  const std::size_t prev = (rank + slots_.size() - 1) % slots_.size();
  const std::size_t next = (rank + 1) % slots_.size();
  const auto local_index = [&](std::size_t of) {
    const auto found = std::find(local.begin(), local.end(), static_cast<int>(of));
    return found == local.end() ? -1 : static_cast<std::int32_t>(found - local.begin());
  };
  return {reinterpret_cast<const std::byte*>(slots_[rank].data()),
          flags_[rank].data(),
          taken_[prev].data(),
          reinterpret_cast<std::byte*>(slots_[next].data()),
          flags_[next].data(),
          taken_[rank].data(),
          bases_[rank].data(),
          local_index(prev),
          local_index(next)};
}

RingArgs RingDevices::args(std::size_t device, const KernelCall& call, int withheld) {
  RingArgs args{};
  args.ports = ports_[device].data();
  args.numel = call.tensors.numel();
  args.piece_elems = static_cast<std::uint32_t>(call.piece_elems);
  args.num_slots = num_slots_;
  args.slot_bytes = kSlotBytes;
  args.world_size = world_size_;
  args.num_channels = call.num_channels;
  args.divisor = Divisor::of(call.tensors.fold().divisor);
  args.phases = call.tensors.phases();
  args.patience = {timeout_ns_, &gave_up_[device], &failures_[device], withheld};
  for (std::size_t i = 0; i < ranks_[device].size(); ++i) {
    const int rank = ranks_[device][i];
    args.rank[i] = rank;
    args.input[i] = call.tensors.input(rank);
    args.output[i] = call.tensors.output(rank);
  }
  return args;
}

void RingDevices::check_counters(int channel, std::uint32_t wanted) const {
  for (const auto* counters : {&flags_, &taken_, &bases_}) {
    for (const auto& of_rank : *counters) {
      CHECK(of_rank[at(channel)] == wanted, "channel ", channel, " counted to ",
            of_rank[at(channel)], ", expected ", wanted);
    }
  }
}

void RingDevices::check_slots() const {
  for (const std::vector<Bytes16>& slots : slots_) {
    for (std::size_t i = 0; i < slots.size(); ++i) {
      if (i * sizeof(Bytes16) % kSlotBytes < kSlotBytes - kUnusedSlotBytes) continue;
      for (const std::uint32_t word : slots[i].word) {
        CHECK(word == kCanaryWord, "a piece was written past the end of its slot");
      }
    }
  }
}

Launch launch_of(RingDevices& devices, std::size_t device, const KernelCall& call, int withheld) {
  const auto kernel =
      kernel_of<RingArgs>(call.tensors.dtype(), {call.tensors.fold().op}, cuda::KernelKind::kRing);
  const RingArgs args = devices.args(device, call, withheld);
  const auto blocks = devices.ranks(device).size() * static_cast<std::size_t>(call.num_channels);
  return {static_cast<unsigned>(blocks), call.num_threads, [=] { kernel(args); },
          static_cast<int>(device)};
}

// Random first counter, mostly close to 2^32, so that counters wrap in the round.
std::uint32_t random_base(Random& random) {
  return random.one_in(3) ? 0 : 0u - static_cast<std::uint32_t>(random.below(60));
}

// At least 2: a ring of one rank is never launched.
int random_world_size(Random& random) { return random.one_in(8) ? 8 : random.between(2, 5); }

// Check that the failure at the earliest step, over all devices, names the missing rank.
std::string check_failures(const RingDevices& devices, int world_size, int absent,
                           std::uint32_t base) {
  const Failure* earliest = nullptr;
  for (std::size_t d = 0; d < devices.num_devices(); ++d) {
    const Failure& failure = devices.failure(d);
    const std::vector<int>& ranks = devices.ranks(d);
    if (ranks == std::vector<int>{absent}) {
      CHECK(failure.is_set == 0, "the withheld rank reported a failure");
      continue;
    }
    CHECK(failure.is_set == 1, "device ", d, " did not fail");
    CHECK(std::find(ranks.begin(), ranks.end(), failure.rank) != ranks.end() &&
              failure.rank != absent,
          "device ", d, " reports for rank ", failure.rank);
    const int to = failure.what == Awaited::kMessage ? world_size - 1 : 1;
    CHECK(failure.peer == (failure.rank + to) % world_size, "rank ", failure.rank, " waited for ",
          failure.peer);
    CHECK(!reached(failure.seen, failure.wanted), failure.seen, " of ", failure.wanted);
    if (earliest == nullptr || failure.step < earliest->step) earliest = &failure;
  }
  if (earliest->peer != absent) {
    return join("rank ", earliest->rank, " waited for ", earliest->peer, ", not for ", absent);
  }
  CHECK(
      earliest->what == Awaited::kSlot || (earliest->seen == base && earliest->wanted == base + 1),
      "rank ", earliest->rank, " waited for message ", earliest->wanted - base);
  return "";
}

std::string withhold_rank(Random& random, int world_size, int absent) {
  constexpr double kTimeoutSeconds = 0.3;
  const RingShape shape{world_size, random.between(1, 2)};
  const std::uint32_t base = random_base(random);
  RingDevices devices(random, shape, base, static_cast<std::uint64_t>(kTimeoutSeconds * 1e9));
  const KernelCall call(random, shape,
                        2 * static_cast<std::size_t>(world_size) + random_size(random, world_size));
  std::vector<std::vector<Launch>> streams;
  for (std::size_t d = 0; d < devices.num_devices(); ++d) {
    streams.push_back({launch_of(devices, d, call, absent)});
  }
  const std::uint64_t begin_ns = emulator::now_ns();
  emulator::run_streams(random, streams);
  const double seconds = 1e-9 * static_cast<double>(emulator::now_ns() - begin_ns);
  CHECK(seconds >= kTimeoutSeconds, "gave up after ", seconds, " s");
  if (seconds > 2 * kTimeoutSeconds) return join("gave up after ", seconds, " s");
  return check_failures(devices, world_size, absent, base);
}

// Waits at later ring steps time out later. Checked on one flag, since ranks start together.
void check_later_steps_wait_longer() {
  constexpr int kStep = 4;
  std::uint32_t flag[kFlagStride] = {};
  std::uint32_t gave_up = 0;
  Failure failure{};
  const cuda::WaitLimits patience{1'000'000, &gave_up, &failure, -1};
  const std::uint64_t begin_ns = emulator::now_ns();
  CHECK(!cuda::poll_flag(flag, cuda::MemoryScope::kDevice, 1, kStep, patience, [](Failure&) {}),
        "nothing was signalled");
  const std::uint64_t waited_ns = emulator::now_ns() - begin_ns;
  CHECK(waited_ns >= patience.timeout_ns + kStep * cuda::kNsPerStep, "gave up after ", waited_ns,
        " ns");
}

void ring_round(Random& random) {
  const int world_size = random_world_size(random);
  const RingShape shape{world_size, random.between(1, world_size > 5 ? 2 : 3)};
  const std::uint32_t base = random_base(random);
  RingDevices devices(random, shape, base, kLongNs);
  std::deque<KernelCall> calls;
  for (int i = random.between(1, 4); i > 0; --i) {
    calls.emplace_back(random, shape, random_size(random, world_size));
  }
  std::vector<std::vector<Launch>> streams(devices.num_devices());
  for (std::size_t d = 0; d < devices.num_devices(); ++d) {
    for (const KernelCall& call : calls) {
      streams[d].push_back(launch_of(devices, d, call, -1));
    }
  }
  emulator::run_streams(random, streams);
  for (const KernelCall& call : calls) call.tensors.check();
  devices.check_slots();
  for (int channel = 0; channel < shape.num_channels; ++channel) {
    std::uint32_t wanted = base;
    for (const KernelCall& call : calls) {
      if (channel < call.num_channels) wanted += call.num_messages(shape.world_size, channel);
    }
    devices.check_counters(channel, wanted);
  }
}

void ring_withheld_round(Random& random) {
  const int world_size = random.between(2, 6);
  const int absent = random.between(0, world_size - 1);
  check_later_steps_wait_longer();
  check_one_of_three([&] { return withhold_rank(random, world_size, absent); });
}

const Part kRing("ring", &ring_round);
const Part kRingWithheld("ring-withheld", &ring_withheld_round, 10);

}  // namespace

}  // namespace pyringar::stress
