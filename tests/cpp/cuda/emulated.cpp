// emulated: the CUDA kernels on CPU threads: every part again and again with random inputs, until
// rounds or seconds are over.
//
//   emulated [--rounds N | --seconds S] [--seed X] [--only PART] [--from-round R]
//
// Build     g++ -std=c++20 -O1 -pthread -ffp-contract=off -fno-strict-aliasing
//             -DPYRINGAR_EMULATED_THREADS=4 -Wno-unknown-pragmas
//             -Icsrc -Itests/cpp -Itests/cpp/cuda tests/cpp/cuda/*.cpp
//             tests/cpp/{check,oracle,rounds}.cpp csrc/cuda/kernels.cpp -x c++
//             csrc/cuda/kernels_*.cu
//           tests/test_cuda_emulated.py builds and runs it with sanitizers, other compilers, and
//           with mistakes planted in the kernels.
// Output    a line per part; the first failed check ends it with status 1, a hang with status 3.

#include "emulated.h"

#include "rounds.h"

namespace pyringar::stress {

namespace {

constexpr Part kParts[] = {
    {"table", &table_round, Often::kOnce},
    {"fused-all", &fused_all_round, Often::kOnce},
    {"fused-mean", &fused_mean_round, Often::kOnce},
    {"fused", &fused_round, Often::kMany},
    {"ring", &ring_round, Often::kMany},
    {"ring-withheld", &ring_withheld_round, Often::kFew},
};

}  // namespace

}  // namespace pyringar::stress

int main(int argc, char** argv) {
  using namespace pyringar::stress;
  return run_parts(kParts, parse_options(argc, argv));
}
