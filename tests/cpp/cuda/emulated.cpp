// emulated: the CUDA kernels on CPU threads: every part again and again with random inputs, until
// rounds or seconds are over.
//
//   emulated [--rounds N | --seconds S] [--seed X] [--only PART] [--from-round R]
//
// Build     g++ -std=c++20 -O1 -pthread -ffp-contract=off -fno-strict-aliasing
//             -DPYRINGAR_EMULATED_THREADS=4 -Wno-unknown-pragmas
//             -Icsrc -Itests/cpp -Itests/cpp/cuda tests/cpp/cuda/*.cpp tests/cpp/check.cpp
//             tests/cpp/oracle.cpp csrc/cuda/kernels.cpp -x c++ csrc/cuda/kernels_*.cu
//           tests/test_cuda_emulated.py builds and runs it with sanitizers, other compilers, and
//           with mistakes planted in the kernels.
// Output    a line per part; the first failed check ends it with status 1, a hang with status 3.

#include "emulated.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace pyringar::stress {

namespace {

enum class Often { kMany, kFew, kOnce };

struct Part {
  const char* name;
  void (*round)(Random& random);
  Often often;  // few: it waits for timeouts. Once: all there is to try, in one round
};

constexpr Part kParts[] = {
    {"table", &table_round, Often::kOnce},
    {"fused-all", &fused_all_round, Often::kOnce},
    {"fused", &fused_round, Often::kMany},
    {"ring", &ring_round, Often::kMany},
    {"ring-withheld", &ring_withheld_round, Often::kFew},
};

struct Options {
  std::uint64_t rounds = 20;
  double seconds = 0;
  std::uint64_t seed = 1;
  std::string only;
  std::uint64_t from_round = 0;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    const char* value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--rounds") {
      options.rounds = std::strtoull(value, nullptr, 10);
    } else if (name == "--seconds") {
      options.seconds = std::strtod(value, nullptr);
    } else if (name == "--seed") {
      options.seed = std::strtoull(value, nullptr, 10);
    } else if (name == "--only") {
      options.only = value;
    } else if (name == "--from-round") {
      options.from_round = std::strtoull(value, nullptr, 10);
    } else {
      std::fprintf(stderr, "unknown option %s; the head of emulated.cpp lists them\n", argv[i]);
      std::exit(2);
    }
  }
  return options;
}

// A round is a second at most on an idle machine; this many is a hang.
constexpr unsigned kHangSeconds = 120;

void report_hang(int) {
  constexpr char kText[] = "a round hangs; the part is the one after the last line above\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kText, sizeof kText - 1);
  std::_Exit(3);
}

void run_part(const Part& part, const Options& options, double share_seconds) {
  const Stopwatch stopwatch;
  const std::uint64_t most = part.often == Often::kOnce  ? 1
                             : part.often == Often::kFew ? (options.rounds + 9) / 10
                                                         : options.rounds;
  const bool by_time = options.seconds > 0 && part.often != Often::kOnce;
  std::uint64_t done = 0;
  do {
    const std::uint64_t round = options.from_round + done++;
    set_position({part.name, options.seed, round});
    alarm(kHangSeconds);
    Random random(options.seed * 1'000'003 + round);
    part.round(random);
    alarm(0);
  } while (by_time ? stopwatch.seconds() < share_seconds : done < most);
  std::printf("%-16s %6llu rounds %8.2f s\n", part.name, static_cast<unsigned long long>(done),
              stopwatch.seconds());
  std::fflush(stdout);
}

int run(const Options& options) {
  std::signal(SIGALRM, &report_hang);
  std::printf("seed %llu\n", static_cast<unsigned long long>(options.seed));
  bool found = false;
  for (const Part& part : kParts) {
    if (!options.only.empty() && options.only != part.name) continue;
    found = true;
    const auto shares = static_cast<double>(options.only.empty() ? std::size(kParts) : 1);
    run_part(part, options, options.seconds / shares);
  }
  if (!found) {
    std::fprintf(stderr, "there is no part %s\n", options.only.c_str());
    return 2;
  }
  std::printf("ok\n");
  return 0;
}

}  // namespace

}  // namespace pyringar::stress

int main(int argc, char** argv) {
  return pyringar::stress::run(pyringar::stress::parse(argc, argv));
}
