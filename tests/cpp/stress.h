// stress: a test program of parts, each run repeatedly with random inputs, and main().
//
// [--rounds N | --seconds S] [--seed X] [--only PART] [--from-round R]
//
// Programs  tests/cpp: the CPU engine (tests/test_stress.py); tests/cpp/cuda: the CUDA kernels,
//           cuda_host: the CUDA host code, cuda_processes: ranks in processes with GPUs
//           (tests/test_cuda_emulated.py)
// Contract  Every round has a separate seed, and runs alone with --from-round. The program prints a
//           line per part. Status 1: a check failed. 2: a wrong option. 3: a hang.
#pragma once

#include "check.h"

namespace pyringar::stress {

inline constexpr int kOnce = 0;  // one round covers all inputs

// A static Part registers itself. It runs in one of `one_in` rounds.
struct Part {
  using Round = void (*)(Random& random);

  Part(const char* name, Round round, int one_in = 1);

  const char* name;
  Round round;
  int one_in;
};

}  // namespace pyringar::stress
