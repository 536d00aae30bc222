// group_test: cuda/group and its parts on devices of CPU threads: who is where, slices, tables,
// staging, links, failures, with the kernels' own source.
//
//   group_test SEED ROUNDS

#include <cstdio>
#include <cstdlib>
#include <string>

#include "cuda/group.h"
#include "cuda/peers.h"
#include "emulated.h"
#include "fake_runtime.h"

namespace pyringar::cuda {

bool enable_peers(int a, int b) { return a == b || stress::peers.reach_each_other; }
bool is_peer_visible(const void*) { return stress::peers.tensors_are_visible; }

}  // namespace pyringar::cuda

namespace pyringar::stress {

namespace {

// One tensor over all ranks, reduced in place.
struct Part {
  DType dtype;
  std::size_t numel;
  Tensors tensors;
};

struct Case {
  std::vector<Part> parts;
  Collective collective;
};

Case make_case(Random& random, std::size_t num_ranks, Algorithm algorithm) {
  Case made;
  const auto k = static_cast<int>(num_ranks);
  const std::size_t edges[] = {0, 1, 2, 63, 64, 65, 200, 1000, 5000};
  // Many of one dtype do not fit into one launch.
  const bool has_many = random.one_in(8);
  const std::size_t num_parts = has_many ? 450 : 1 + random.below(40);
  const DType dtype_of_many = random_dtype(random);
  made.collective.operation = "all_reduce";
  made.collective.algorithm = algorithm;
  made.collective.fold = Fold::of(random_op(random), k);
  made.collective.pointers.reserve(num_parts * num_ranks);
  for (std::size_t p = 0; p < num_parts; ++p) {
    const std::size_t numel = has_many ? random.below(20) : edges[random.below(9)];
    const DType dtype = has_many ? dtype_of_many : random_dtype(random);
    made.parts.push_back(
        {dtype, numel, Tensors(random, dtype, num_ranks, numel, random_addresses(random))});
    void* const* table = made.collective.pointers.data() + made.collective.pointers.size();
    made.collective.tensors.push_back({table, table, k, k, numel, dtype});
    for (int rank = 0; rank < k; ++rank) {
      made.collective.pointers.push_back(made.parts.back().tensors[static_cast<std::size_t>(rank)]);
      made.collective.ranks.push_back(rank);
    }
  }
  return made;
}

void check_part(const Part& part, const Collective& collective) {
  const std::vector<std::byte> expected = expected_reduction(
      part.dtype, collective.fold.op, collective.fold.divisor, part.tensors.before(), part.numel,
      collective.algorithm == Algorithm::kRing);
  for (std::size_t rank = 0; rank < part.tensors.count(); ++rank) {
    check_same(part.dtype, part.tensors[rank], expected.data(), part.numel,
               join(algorithm_name(collective.algorithm), " ", op_name(collective.fold.op),
                    ", rank ", rank, " of ", part.tensors.count()));
  }
  part.tensors.check_canaries();
}

void check_case(Random& random, cuda::Group& group, Algorithm algorithm, std::size_t num_ranks) {
  const Case made = make_case(random, num_ranks, algorithm);
  const std::vector<cudaStream_t> streams(group.devices().size());
  group.run(made.collective, streams);
  run_queues();
  group.check_usable();
  for (const Part& part : made.parts) check_part(part, made.collective);
}

void check_round(Random& random) {
  const std::vector<std::vector<int>> all_devices = {
      {0, 0},       {0, 0, 0, 0, 0}, {0, 1},        {0, 0, 1, 1}, {2, 0, 1},
      {0, 1, 0, 1}, {-1, 0, 0},      {0, -1, 1, 0}, {1, -1},      {3}};
  const std::vector<int> devices = all_devices[random.below(all_devices.size())];
  peers = {!random.one_in(3), !random.one_in(3)};
  cuda::Group group(devices, kLong);
  for (int call = 0; call < 3; ++call) {
    const bool can_ring = !group.has_host_ranks() && devices.size() > 1;
    const bool one_memory = group.devices().size() == 1 && !group.has_host_ranks();
    Algorithm algorithm = one_memory && random.one_in(2) ? Algorithm::kFused : Algorithm::kDirect;
    if (can_ring && random.one_in(2)) algorithm = Algorithm::kRing;
    check_case(random, group, algorithm, devices.size());
  }
  group.close();
  try {
    check_case(random, group, Algorithm::kDirect, devices.size());
    CHECK(false, "a closed group took a call");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kState, error.what());
  }
}

void check_withheld(Random& random) {
  peers = {};
  const bool ring = random.one_in(2);
  const std::vector<int> devices = ring ? std::vector<int>{0, 1, 0, 1} : std::vector<int>{0, 1};
  cuda::Group group(devices, std::chrono::milliseconds(100));
  group.withhold_rank(1);
  Case made = make_case(random, devices.size(), ring ? Algorithm::kRing : Algorithm::kDirect);
  if (made.parts[0].numel == 0) return;
  made.collective.tensors.resize(1);
  group.run(made.collective, std::vector<cudaStream_t>(2));
  run_queues();
  for (const bool is_first : {true, false}) {
    try {
      group.check_usable();
      CHECK(false, "nobody missed the rank that did not come");
    } catch (const Error& error) {
      const std::string text = error.what();
      CHECK(error.kind() == ErrorKind::kTimeout, text);
      CHECK(is_first == (text.find("failed before") == std::string::npos), text);
      const char* culprit = ring ? "for rank 1 (cuda:1)" : "for cuda:1 to begin";
      CHECK(text.find(culprit) != std::string::npos, text);
    }
  }
}

}  // namespace

}  // namespace pyringar::stress

int main(int argc, char** argv) {
  using namespace pyringar::stress;
  const std::uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const long rounds = argc > 2 ? std::strtol(argv[2], nullptr, 10) : 20;
  Random random(seed);
  Random delays = random.fork();
  use_delays(&delays);
  for (long round = 0; round < rounds; ++round) check_round(random);
  for (long round = 0; round < 4; ++round) check_withheld(random);
  std::printf("ok: %ld rounds\n", rounds);
  return 0;
}
