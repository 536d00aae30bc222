#include "stress.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace pyringar::stress {

namespace {

struct Options {
  std::uint64_t rounds = 20;
  double seconds = 0;  // > 0: time for all parts, instead of `rounds`
  std::uint64_t seed = 1;
  std::string only;
  std::uint64_t from_round = 0;
};

std::vector<Part>& all_parts() {
  static std::vector<Part> parts;
  return parts;
}

// Far more than a round, which takes at most a second on an idle machine.
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
  try {
    part.round(random);
  } catch (const std::exception& error) {
    CHECK(false, error.what());
  }
  alarm(0);
}

void run_part(const Part& part, const Options& options, double share_seconds) {
  const Stopwatch stopwatch;
  const auto one_in = static_cast<std::uint64_t>(part.one_in);
  const std::uint64_t most = part.one_in == kOnce ? 1 : (options.rounds + one_in - 1) / one_in;
  const bool by_time = options.seconds > 0 && part.one_in != kOnce;
  std::uint64_t done = 0;
  do {
    run_round(part, options.seed, options.from_round + done++);
  } while (by_time ? stopwatch.seconds() < share_seconds : done < most);
  std::printf("%-16s %6llu rounds %8.2f s\n", part.name, static_cast<unsigned long long>(done),
              stopwatch.seconds());
  std::fflush(stdout);
}

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
      std::fprintf(stderr, "unknown option %s; stress.h lists them\n", argv[i]);
      std::exit(2);
    }
  }
  return options;
}

int run_parts(const Options& options) {
  std::signal(SIGALRM, &report_hang);
  std::vector<Part>& parts = all_parts();
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return std::string(a.name) < b.name; });
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

}  // namespace

Part::Part(const char* name, Round round, int one_in) : name(name), round(round), one_in(one_in) {
  all_parts().push_back(*this);
}

}  // namespace pyringar::stress

int main(int argc, char** argv) {
  using namespace pyringar::stress;
  return run_parts(parse_options(argc, argv));
}
