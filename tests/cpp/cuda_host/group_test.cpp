// group_test: csrc/cuda/group.cpp on devices of CPU threads: who is where, slices, tables, staging,
// links, failures, with the kernels' own source.
//
//   group_test SEED ROUNDS

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "cuda/group.h"
#include "cuda/peers.h"
#include "fake_runtime.h"

namespace pyringar::cuda {

bool enable_peers(int a, int b) { return a == b || stress::peers.reach_each_other; }
bool is_peer_visible(const void*) { return stress::peers.tensors_are_visible; }

}  // namespace pyringar::cuda

namespace pyringar::stress {

namespace {

constexpr float kGuard = -7777.0f;

struct Tensor {
  std::vector<float> memory;
  std::size_t offset;  // of the first element; a guard lies before and after

  Tensor(Random& random, std::size_t numel, std::size_t shift) : memory(numel + shift + 2, kGuard) {
    offset = shift + 1;
    for (std::size_t i = 0; i < numel; ++i) {
      memory[offset + i] = static_cast<float>(random.between(-1000, 1000)) / 7.0f;
    }
  }
  float* data() { return memory.data() + offset; }
};

struct Case {
  std::vector<int> place;
  std::vector<std::size_t> sizes;
  std::vector<std::vector<Tensor>> tensors;  // [part][rank]
  Collective collective;
};

Case make_case(Random& random, std::vector<int> place, Algorithm algorithm) {
  Case made{std::move(place), {}, {}, {}};
  const auto k = static_cast<int>(made.place.size());
  const std::size_t edges[] = {0, 1, 2, 63, 64, 65, 200, 1000, 5000};
  const std::size_t parts = random.one_in(8) ? 450 : 1 + random.below(40);
  made.collective.operation = "all_reduce";
  made.collective.algorithm = algorithm;
  made.collective.fold.divisor = random.one_in(2) ? 1 : k;
  for (std::size_t p = 0; p < parts; ++p) {
    const std::size_t numel = parts > 100 ? random.below(20) : edges[random.below(9)];
    const std::size_t shift = random.below(4);
    std::vector<Tensor> ranks;
    for (int r = 0; r < k; ++r) ranks.emplace_back(random, numel, random.one_in(3) ? 2 : shift);
    made.sizes.push_back(numel);
    made.tensors.push_back(std::move(ranks));
  }
  made.collective.pointers.reserve(parts * made.place.size());
  for (std::size_t p = 0; p < parts; ++p) {
    void* const* table = made.collective.pointers.data() + made.collective.pointers.size();
    made.collective.tensors.push_back({table, table, k, k, made.sizes[p], DType::kFloat32});
    for (int r = 0; r < k; ++r) {
      made.collective.pointers.push_back(made.tensors[p][static_cast<std::size_t>(r)].data());
      made.collective.ranks.push_back(r);
    }
  }
  return made;
}

std::vector<float> expected_of(Case& made, std::size_t part) {
  const auto k = static_cast<int>(made.place.size());
  const std::size_t numel = made.sizes[part];
  std::vector<float> sums(numel);
  for (int chunk = 0; chunk < k; ++chunk) {
    const Range range = chunk_range(numel, k, chunk);
    const int first = made.collective.algorithm == Algorithm::kRing ? chunk + 1 : 0;
    for (std::size_t i = range.begin; i < range.end; ++i) {
      float sum = made.tensors[part][static_cast<std::size_t>(first % k)].data()[i];
      for (int r = 1; r < k; ++r) {
        sum += made.tensors[part][static_cast<std::size_t>((first + r) % k)].data()[i];
      }
      sums[i] = made.collective.fold.divisor == 1 ? sum : sum / static_cast<float>(k);
    }
  }
  return sums;
}

void check_case(Random& random, cuda::Group& group, Algorithm algorithm, std::vector<int> place) {
  Case made = make_case(random, std::move(place), algorithm);
  std::vector<std::vector<float>> expected;
  for (std::size_t p = 0; p < made.sizes.size(); ++p) expected.push_back(expected_of(made, p));
  const std::vector<cudaStream_t> streams(group.devices().size());
  group.run(made.collective, streams);
  run_queues();
  group.check_usable();
  for (std::size_t p = 0; p < made.sizes.size(); ++p) {
    for (std::size_t r = 0; r < made.place.size(); ++r) {
      Tensor& tensor = made.tensors[p][r];
      for (std::size_t i = 0; i < made.sizes[p]; ++i) {
        CHECK(std::memcmp(&tensor.data()[i], &expected[p][i], sizeof(float)) == 0, "part ", p,
              " of ", made.sizes.size(), ", rank ", r, ", element ", i, " of ", made.sizes[p], ": ",
              tensor.data()[i], ", expected ", expected[p][i], "; ", algorithm_name(algorithm));
      }
      CHECK(tensor.data()[-1] == kGuard && tensor.memory.back() == kGuard, "part ", p, ", rank ", r,
            ": written outside");
    }
  }
}

void check_round(Random& random) {
  const std::vector<std::vector<int>> places = {
      {0, 0},       {0, 0, 0, 0, 0}, {0, 1},        {0, 0, 1, 1}, {2, 0, 1},
      {0, 1, 0, 1}, {-1, 0, 0},      {0, -1, 1, 0}, {1, -1},      {3}};
  const std::vector<int> place = places[random.below(places.size())];
  peers = {!random.one_in(3), !random.one_in(3)};
  cuda::Group group(place, kLong);
  for (int call = 0; call < 3; ++call) {
    const bool can_ring = !group.has_host_ranks() && place.size() > 1;
    const bool one_memory = group.devices().size() == 1 && !group.has_host_ranks();
    Algorithm algorithm = one_memory && random.one_in(2) ? Algorithm::kFused : Algorithm::kDirect;
    if (can_ring && random.one_in(2)) algorithm = Algorithm::kRing;
    check_case(random, group, algorithm, place);
  }
  group.close();
  try {
    check_case(random, group, Algorithm::kDirect, place);
    CHECK(false, "a closed group took a call");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kState, error.what());
  }
}

void check_withheld(Random& random) {
  peers = {};
  const bool ring = random.one_in(2);
  const std::vector<int> place = ring ? std::vector<int>{0, 1, 0, 1} : std::vector<int>{0, 1};
  cuda::Group group(place, std::chrono::milliseconds(100));
  group.withhold_rank(1);
  Case made = make_case(random, place, ring ? Algorithm::kRing : Algorithm::kDirect);
  if (made.sizes[0] == 0) return;
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
