// stress: the CPU engine without Python: every part again and again with random inputs, until
// rounds or seconds are over.
//
//   stress [--rounds N | --seconds S] [--seed X] [--only PART] [--from-round R]
//   stress --all-floats       every float through the vector and the scalar narrowing
//   stress --planted-race     a data race on purpose: ThreadSanitizer must report it
//   stress --planted-failure  a check that fails
//
// Build     g++ -std=c++20 -O2 -pthread -ffp-contract=off -Icsrc tests/cpp/*.cpp
//           csrc/{os,cpu,process}/*.cpp
//           tests/test_stress.py builds and runs it with sanitizers, other compilers and for Arm.
// Output    a line per part; the first failed check ends it with status 1.

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "parts.h"

namespace pyringar::stress {

namespace {

enum class Often { kMany, kFew, kOnce };

struct Part {
  const char* name;
  void (*round)(Random& random);
  Often often;  // few: it waits for timeouts. Once: all there is to try, in one round
};

constexpr Part kParts[] = {
    {"half", &half_round, Often::kOnce},
    {"kernels", &kernels_round, Often::kMany},
    {"strided", &strided_round, Often::kMany},
    {"waits", &waits_round, Often::kMany},
    {"stillness", &stillness_round, Often::kMany},
    {"pool", &pool_round, Often::kMany},
    {"turn", &turn_round, Often::kMany},
    {"fused", &fused_round, Often::kMany},
    {"program", &program_round, Often::kMany},
    {"ring", &ring_round, Often::kMany},
    {"direct", &direct_round, Often::kMany},
    {"withheld", &withheld_round, Often::kFew},
    {"group", &group_round, Often::kMany},
    {"late-rank", &late_rank_round, Often::kFew},
    {"async", &async_round, Often::kMany},
    {"two-groups", &two_groups_round, Often::kMany},
    {"float-mode", &float_mode_round, Often::kFew},
    {"no-threads", &no_threads_round, Often::kFew},
    {"fork", &fork_round, Often::kOnce},
    {"packed-line", &flat_view_round, Often::kMany},
    {"processes", &processes_round, Often::kMany},
    {"counters", &process_counters_round, Often::kMany},
    {"mismatch", &process_mismatch_round, Often::kMany},
    {"failures", &process_failures_round, Often::kFew},
};

struct Options {
  std::uint64_t rounds = 20;
  double seconds = 0;
  std::uint64_t seed = 1;
  std::string only;
  std::uint64_t from_round = 0;
  bool all_floats = false;
  bool planted_race = false;
  bool planted_failure = false;
};

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--all-floats" || name == "--planted-race" || name == "--planted-failure") {
      options.all_floats |= name == "--all-floats";
      options.planted_race |= name == "--planted-race";
      options.planted_failure |= name == "--planted-failure";
      continue;
    }
    const char* value = ++i < argc ? argv[i] : "";
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
      std::fprintf(stderr, "unknown option %s; the head of stress.cpp lists them\n", name.c_str());
      std::exit(2);
    }
  }
  return options;
}

// A round is a second at most on an idle machine; this many is a hang.
constexpr unsigned kHangSeconds = 300;

void report_hang(int) {
  constexpr char kText[] = "a round hangs; the part is the one after the last line above\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kText, sizeof kText - 1);
  std::_Exit(3);
}

// Every round has a seed of its own, so that it can be run alone.
void run_round(const Part& part, std::uint64_t seed, std::uint64_t round) {
  set_position({part.name, seed, round});
  alarm(kHangSeconds);
  Random random(seed * 1'000'003 + round);
  part.round(random);
  alarm(0);
}

// With seconds: every part gets its share of them. One round at least.
void run_part(const Part& part, const Options& options, double share_seconds) {
  const Stopwatch stopwatch;
  const std::uint64_t most = part.often == Often::kOnce  ? 1
                             : part.often == Often::kFew ? (options.rounds + 9) / 10
                                                         : options.rounds;
  std::uint64_t done = 0;
  do {
    run_round(part, options.seed, options.from_round + done);
    ++done;
  } while (options.seconds > 0 && part.often != Often::kOnce ? stopwatch.seconds() < share_seconds
                                                             : done < most);
  std::printf("%-13s %6llu rounds %8.2f s\n", part.name, static_cast<unsigned long long>(done),
              stopwatch.seconds());
  std::fflush(stdout);
}

void fail_on_purpose(Random&) {
  const int two = 2;
  CHECK(two + two == 5, two + two);
}

int run(const Options& options) {
  if (options.planted_failure) {
    run_round({"planted-failure", &fail_on_purpose, Often::kOnce}, options.seed, 0);
  }
  if (options.planted_race) {
    run_planted_race();
    return 0;
  }
  if (options.all_floats) {
    compare_all_floats();
    return 0;
  }
  std::signal(SIGALRM, &report_hang);
  std::printf("seed %llu\n", static_cast<unsigned long long>(options.seed));
  bool found = false;
  for (const Part& part : kParts) {
    if (!options.only.empty() && options.only != part.name) continue;
    found = true;
    run_part(part, options, options.seconds / static_cast<double>(std::size(kParts)));
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
