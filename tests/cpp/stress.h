// stress: the parts of a test program, each run again and again with random inputs; and main().
//
//   [--rounds N | --seconds S] [--seed X] [--only PART] [--from-round R]
//
// Programs  stress (tests/cpp): the CPU engine; tests/test_stress.py builds and runs it
//           emulated (tests/cpp/cuda): the CUDA kernels; tests/test_cuda_emulated.py
//           host (tests/cpp/cuda_host): the CUDA host code; tests/test_cuda_emulated.py
//           processes (tests/cpp/cuda_processes); tests/test_cuda_emulated.py
// Contract  Every round has a seed of its own, so that it can be run alone. A round leaves no
//           thread behind and needs no other round before it. A line per part; the first failed
//           check ends the process with status 1, a wrong option with 2, a hang with 3.
#pragma once

#include "check.h"

namespace pyringar::stress {

inline constexpr int kOnce = 0;  // all there is to try, in one round

// Made before main(), it registers a part that runs in one of `one_in` rounds.
struct Part {
  using Round = void (*)(Random& random);

  Part(const char* name, Round round, int one_in = 1);

  const char* name;
  Round round;
  int one_in;
};

}  // namespace pyringar::stress
