// stress: test programs of parts, each run repeatedly with random inputs; and their main().
//
//   [--rounds N | --seconds S] [--seed X] [--only PART] [--from-round R]
//
// Programs  stress (tests/cpp): the CPU engine; tests/test_stress.py builds and runs it
//           emulated (tests/cpp/cuda): the CUDA kernels; tests/test_cuda_emulated.py
//           host (tests/cpp/cuda_host): the CUDA host code; tests/test_cuda_emulated.py
//           processes (tests/cpp/cuda_processes); tests/test_cuda_emulated.py
// Contract  A round has a seed and runs alone: it needs no earlier round and leaves no thread. A
//           failed check ends the process with status 1, a wrong option with 2, a hang with 3.
#pragma once

#include "check.h"

namespace pyringar::stress {

inline constexpr int kOnce = 0;  // one round covers everything

// A test, registered before main(), that runs in one of `one_in` rounds.
struct Part {
  using Round = void (*)(Random& random);

  Part(const char* name, Round round, int one_in = 1);

  const char* name;
  Round round;
  int one_in;
};

}  // namespace pyringar::stress
