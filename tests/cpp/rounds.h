// rounds: the main program of tests that run parts again and again with random inputs.
//
//   [--rounds N | --seconds S] [--seed X] [--only PART] [--from-round R]
//
// Contract  Every round has a seed of its own, so that it can be run alone. A line per part; the
//           first failed check ends the process with status 1, a wrong option with 2, a hang
//           with 3.
#pragma once

#include <cstdint>
#include <functional>
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

// How many words an option of the program's own takes, 0 if there is none; behind those so far.
using OtherOption =
    std::function<int(const std::string& name, const char* value, const Options& so_far)>;
Options parse_options(int argc, char** argv, const OtherOption& other);

void run_round(const Part& part, std::uint64_t seed, std::uint64_t round);
// The program's exit status.
int run_parts(std::span<const Part> parts, const Options& options);

}  // namespace pyringar::stress
