// direct_test: the direct kernel on two and three devices of threads, launch after launch; a device
// that does not come.

#include "cuda/direct.cuh"

#include <algorithm>
#include <chrono>
#include <thread>

#include "emulated.h"

namespace pyringar::stress {

namespace {

using cuda::Awaited;
using cuda::BarrierPorts;
using cuda::Failure;
using cuda::Patience;
using cuda::SmallTable;
using emulator::Launch;

constexpr int kMaxBlocks = 3;

// Flags of all devices, wired as in cuda/devices.cpp; barriers are counted from `base`.
class DirectDevices {
 public:
  DirectDevices(int num_devices, std::uint32_t base, std::uint64_t timeout_ns)
      : num_devices_(num_devices),
        timeout_ns_(timeout_ns),
        gave_up_(static_cast<std::size_t>(num_devices)),
        failures_(static_cast<std::size_t>(num_devices)) {
    const auto words = static_cast<std::size_t>(kMaxBlocks * cuda::kFlagStride);
    for (int d = 0; d < num_devices; ++d) {
      arrived_.emplace_back(static_cast<std::size_t>(num_devices) * words, base);
      counts_.emplace_back(words, base);
    }
  }

  BarrierPorts ports(int device) {
    BarrierPorts ports{};
    ports.arrived = arrived_[static_cast<std::size_t>(device)].data();
    for (std::size_t peer = 0; peer < arrived_.size(); ++peer) {
      ports.arrived_there[peer] = arrived_[peer].data();
    }
    ports.count = counts_[static_cast<std::size_t>(device)].data();
    ports.device = device;
    ports.num_devices = num_devices_;
    ports.max_blocks = kMaxBlocks;
    return ports;
  }
  Patience patience(int device, int withheld) {
    const auto d = static_cast<std::size_t>(device);
    return {timeout_ns_, &gave_up_[d], &failures_[d], withheld};
  }
  const Failure& failure(int device) const { return failures_[static_cast<std::size_t>(device)]; }
  std::uint32_t& arrived(int on, int from, int block) {
    return arrived_[static_cast<std::size_t>(on)]
                   [static_cast<std::size_t>((from * kMaxBlocks + block) * cuda::kFlagStride)];
  }
  void check_counts(unsigned num_blocks, std::uint32_t wanted) const {
    for (const auto& count : counts_) {
      for (unsigned b = 0; b < num_blocks; ++b) {
        CHECK(count[b * cuda::kFlagStride] == wanted, "block ", b, " passed ",
              count[b * cuda::kFlagStride], " barriers, expected ", wanted);
      }
    }
  }

 private:
  const int num_devices_;
  const std::uint64_t timeout_ns_;
  std::vector<std::vector<std::uint32_t>> arrived_;
  std::vector<std::vector<std::uint32_t>> counts_;
  std::vector<std::uint32_t> gave_up_;
  std::vector<Failure> failures_;
};

// Slices begin at multiples of this, as in cuda/tables.h.
constexpr std::size_t kSliceElems = 64;

SmallTable slice_table(void* const* pointers, int k, DType dtype, std::size_t numel, int divisor,
                       int num_devices, int device) {
  const Range slice = chunk_range((numel + kSliceElems - 1) / kSliceElems, num_devices, device);
  const std::size_t begin = std::min(slice.begin * kSliceElems, numel);
  const std::size_t end = std::min(slice.end * kSliceElems, numel);
  std::vector<void*> moved(pointers, pointers + k);
  for (void*& pointer : moved) {
    pointer = static_cast<std::byte*>(pointer) + begin * item_bytes(dtype);
  }
  SmallTable table;
  cuda::TableBuilder<SmallTable> builder(table, item_bytes(dtype), k, k, divisor);
  CHECK(builder.add(moved.data(), moved.data(), end - begin), "no room for ", k, " ranks");
  return table;
}

auto direct_kernel(DType dtype, ReduceOp op) {
  return kernel_of<SmallTable, BarrierPorts, Patience>(dtype, op, cuda::KernelKind::kDirectSmall);
}

// What one tensor over all ranks goes through: call after call in place, each with inputs of its
// own, which every device writes into its ranks' tensors, and with results that it reads there.
class DirectTensor {
 public:
  DirectTensor(Random& random, int k, int num_devices, int calls)
      : k_(k),
        num_devices_(num_devices),
        dtype_(random_dtype(random)),
        numel_(random_numel(random, 3000)),
        op_(random_op(random)),
        divisor_(op_ == ReduceOp::kMean ? k : 1),
        tensors_(random, dtype_, static_cast<std::size_t>(k), numel_, random_addresses(random)) {
    for (int call = 0; call < calls; ++call) {
      inputs_.emplace_back(random, dtype_, static_cast<std::size_t>(k), numel_,
                           Addresses::kAligned);
      expected_.push_back(
          expected_reduction(dtype_, op_, divisor_, inputs_.back().before(), numel_, false));
    }
  }

  std::vector<Launch> stream(DirectDevices& devices, int device, unsigned num_blocks) const {
    const SmallTable table =
        slice_table(tensors_.pointers(), k_, dtype_, numel_, divisor_, num_devices_, device);
    std::vector<Launch> launches;
    for (std::size_t call = 0; call < inputs_.size(); ++call) {
      launches.push_back({1, 1, [=, this] { write_inputs(device, call); }});
      launches.push_back(
          {num_blocks, cuda::kThreads,
           [=, this, ports = devices.ports(device), patience = devices.patience(device, -1)] {
             direct_kernel(dtype_, op_)(table, ports, patience);
           }});
      launches.push_back({1, 1, [=, this] { check_outputs(device, call); }});
    }
    return launches;
  }
  void check_canaries() const { tensors_.check_canaries(); }

 private:
  void write_inputs(int device, std::size_t call) const {
    for (int rank = device; tensors_.bytes() > 0 && rank < k_; rank += num_devices_) {
      const auto r = static_cast<std::size_t>(rank);
      std::memcpy(tensors_[r], inputs_[call][r], tensors_.bytes());
    }
  }
  void check_outputs(int device, std::size_t call) const {
    for (int rank = device; rank < k_; rank += num_devices_) {
      check_same(dtype_, tensors_[static_cast<std::size_t>(rank)], expected_[call].data(), numel_,
                 join("direct ", op_name(op_), " over ", k_, " ranks on ", num_devices_,
                      " devices, call ", call, " rank ", rank));
    }
  }

  const int k_;
  const int num_devices_;
  const DType dtype_;
  const std::size_t numel_;
  const ReduceOp op_;
  const int divisor_;
  Tensors tensors_;
  std::deque<Tensors> inputs_;
  std::vector<std::vector<std::byte>> expected_;
};

// Barriers come in pairs; sometimes the count wraps within the round.
std::uint32_t random_base(Random& random) {
  return random.one_in(3) ? 0 : 0u - 2 * static_cast<std::uint32_t>(random.below(6));
}

// Everybody but `withheld` gives up at the barrier of a launch and says so. "" or a complaint.
std::string check_failures(const DirectDevices& devices, int num_devices, int withheld,
                           std::uint32_t base) {
  for (int d = 0; d < num_devices; ++d) {
    const Failure& failure = devices.failure(d);
    if (d == withheld) {
      CHECK(failure.is_set == 0, "the withheld device reported a failure");
      continue;
    }
    CHECK(failure.is_set == 1 && failure.what == Awaited::kBarrier, "device ", d, " did not fail");
    CHECK(failure.rank == d && failure.step == 0, "device ", failure.rank, " step ", failure.step);
    CHECK(failure.seen == base && failure.wanted == base + 1, failure.seen, " of ", failure.wanted);
    if (failure.peer != withheld) return join("device ", d, " waited for ", failure.peer);
  }
  return "";
}

std::string withhold_device(Random& random, int num_devices, int withheld) {
  constexpr double kTimeoutSeconds = 0.1;
  const std::uint32_t base = random_base(random);
  DirectDevices devices(num_devices, base, static_cast<std::uint64_t>(kTimeoutSeconds * 1e9));
  const Tensors tensors(random, DType::kFloat32, 2, 500, Addresses::kAligned);
  std::vector<std::vector<Launch>> streams;
  for (int d = 0; d < num_devices; ++d) {
    const SmallTable table =
        slice_table(tensors.pointers(), 2, DType::kFloat32, 500, 1, num_devices, d);
    const BarrierPorts ports = devices.ports(d);
    const Patience patience = devices.patience(d, withheld);
    streams.push_back({{2, cuda::kThreads, [=] {
                          direct_kernel(DType::kFloat32, ReduceOp::kSum)(table, ports, patience);
                        }}});
  }
  const Stopwatch stopwatch;
  emulator::run_streams(random, streams);
  const double seconds = stopwatch.seconds();
  tensors.check_unchanged();
  devices.check_counts(2, base);
  CHECK(seconds >= kTimeoutSeconds, "gave up after ", seconds, " s");
  if (seconds > 2 * kTimeoutSeconds) return join("gave up after ", seconds, " s");
  return check_failures(devices, num_devices, withheld, base);
}

// The other device folds for two timeouts between its barriers, and shows that it is under way. ""
// or a complaint: a busy machine may have kept it from that.
std::string wait_while_the_other_folds(Random& random) {
  constexpr auto kTimeout = std::chrono::milliseconds(200);
  DirectDevices devices(2, 0, std::chrono::nanoseconds(kTimeout).count());
  const Tensors tensors(random, DType::kFloat32, 2, 500, Addresses::kAligned);
  const SmallTable table = slice_table(tensors.pointers(), 2, DType::kFloat32, 500, 1, 2, 0);
  const BarrierPorts ports = devices.ports(0);
  const Patience patience = devices.patience(0, -1);
  std::uint32_t* flag = &devices.arrived(0, 1, 0);
  const auto fold = [=] {
    cuda::store_release(flag, 1);
    for (std::uint32_t tile = 1; tile <= 8; ++tile) {
      std::this_thread::sleep_for(kTimeout / 4);
      cuda::progressed(flag, tile);
    }
    cuda::store_release(flag, 2);
  };
  const auto kernel = [=] {
    direct_kernel(DType::kFloat32, ReduceOp::kSum)(table, ports, patience);
  };
  emulator::run_streams(random, {{{1, cuda::kThreads, kernel}}, {{1, 1, fold}}});
  return devices.failure(0).is_set == 0 ? "" : "gave up on a device that was under way";
}

// The other device came to the first barrier and not to the second.
void check_stops_halfway(Random& random) {
  DirectDevices devices(2, 0, 50'000'000);
  const Tensors tensors(random, DType::kFloat32, 2, 500, Addresses::kAligned);
  devices.arrived(0, 1, 0) = 1;
  const SmallTable table = slice_table(tensors.pointers(), 2, DType::kFloat32, 500, 1, 2, 0);
  const BarrierPorts ports = devices.ports(0);
  const Patience patience = devices.patience(0, -1);
  emulator::run_streams(random, {{{1, cuda::kThreads, [=] {
                                     direct_kernel(DType::kFloat32, ReduceOp::kSum)(table, ports,
                                                                                    patience);
                                   }}}});
  const Failure& failure = devices.failure(0);
  CHECK(failure.is_set == 1 && failure.peer == 1 && failure.step == 1, "peer ", failure.peer,
        " step ", failure.step);
  CHECK(devices.arrived(1, 0, 0) == 2, "device 0 came to ", devices.arrived(1, 0, 0), " barriers");
  CHECK(cuda::progress_of(&devices.arrived(1, 0, 0)) == table.num_tiles - 1, "device 0 showed ",
        cuda::progress_of(&devices.arrived(1, 0, 0)), " as its last tile of ", table.num_tiles);
}

}  // namespace

void direct_round(Random& random) {
  const int num_devices = random.between(2, 3);
  const int calls = random.between(1, 4);
  const std::uint32_t base = random_base(random);
  const auto num_blocks = static_cast<unsigned>(random.between(1, kMaxBlocks));
  DirectDevices devices(num_devices, base, kLongNs);
  const DirectTensor tensor(random, random.between(1, 5), num_devices, calls);
  std::vector<std::vector<Launch>> streams;
  for (int d = 0; d < num_devices; ++d) {
    streams.push_back(tensor.stream(devices, d, num_blocks));
  }
  emulator::run_streams(random, streams);
  tensor.check_canaries();
  devices.check_counts(num_blocks, base + 2 * static_cast<std::uint32_t>(calls));
}

void direct_withheld_round(Random& random) {
  const int num_devices = random.between(2, 3);
  const int withheld = random.between(0, num_devices - 1);
  check_one_of_three([&] { return withhold_device(random, num_devices, withheld); });
  check_stops_halfway(random);
  check_one_of_three([&] { return wait_while_the_other_folds(random); });
}

}  // namespace pyringar::stress
