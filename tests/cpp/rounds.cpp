// rounds: see the header.

#include "rounds.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

namespace pyringar::stress {

namespace {

// A round is a second at most on an idle machine; this many is a hang.
constexpr unsigned kHangSeconds = 300;

void report_hang(int) {
  constexpr char kText[] = "a round hangs; the part is the one after the last line above\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kText, sizeof kText - 1);
  std::_Exit(3);
}

void run_round(const Part& part, std::uint64_t seed, std::uint64_t round) {
  set_position({part.name, seed, round});
  alarm(kHangSeconds);
  Random random(seed * 1'000'003 + round);
  part.round(random);
  alarm(0);
}

// One round at least.
void run_part(const Part& part, const Options& options, double share_seconds) {
  const Stopwatch stopwatch;
  const std::uint64_t most = part.often == Often::kOnce  ? 1
                             : part.often == Often::kFew ? (options.rounds + 9) / 10
                                                         : options.rounds;
  const bool by_time = options.seconds > 0 && part.often != Often::kOnce;
  std::uint64_t done = 0;
  do {
    run_round(part, options.seed, options.from_round + done++);
  } while (by_time ? stopwatch.seconds() < share_seconds : done < most);
  std::printf("%-16s %6llu rounds %8.2f s\n", part.name, static_cast<unsigned long long>(done),
              stopwatch.seconds());
  std::fflush(stdout);
}

}  // namespace

Options parse_options(int argc, char** argv) {
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
      std::fprintf(stderr, "unknown option %s; the head of the program's source lists them\n",
                   argv[i]);
      std::exit(2);
    }
  }
  return options;
}

int run_parts(std::span<const Part> parts, const Options& options) {
  std::signal(SIGALRM, &report_hang);
  std::printf("seed %llu\n", static_cast<unsigned long long>(options.seed));
  bool found = false;
  for (const Part& part : parts) {
    if (!options.only.empty() && options.only != part.name) continue;
    found = true;
    const auto shares = static_cast<double>(options.only.empty() ? parts.size() : 1);
    run_part(part, options, options.seconds / shares);
  }
  if (!found) {
    std::fprintf(stderr, "there is no part %s\n", options.only.c_str());
    return 2;
  }
  std::printf("ok\n");
  return 0;
}

}  // namespace pyringar::stress
