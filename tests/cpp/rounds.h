// rounds: the main program of tests that run parts again and again with random inputs.
//
//   [--rounds N | --seconds S] [--seed X] [--only PART] [--from-round R]
//
// Contract  Every round has a seed of its own, so that it can be run alone. A line per part; the
//           first failed check ends the process with status 1, a wrong option with 2, a hang
//           with 3.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "check.h"

namespace pyringar::stress {

enum class Often { kMany, kFew, kOnce };

struct Part {
  const char* name;
  void (*round)(Random& random);
  Often often;  // few: it waits for timeouts. Once: all there is to try, in one round
};

struct Options {
  std::uint64_t rounds = 20;
  double seconds = 0;  // or so long, a share of it for each part
  std::uint64_t seed = 1;
  std::string only;
  std::uint64_t from_round = 0;
};

Options parse_options(int argc, char** argv);
// The program's exit status.
int run_parts(std::span<const Part> parts, const Options& options);

}  // namespace pyringar::stress
