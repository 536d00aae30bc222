// stress: the CPU engine without Python: every part again and again with random inputs, until
// rounds or seconds are over.
//
//   stress [--rounds N | --seconds S] [--seed X] [--only PART] [--from-round R]
//
// Build     g++ -std=c++20 -O2 -pthread -ffp-contract=off -Icsrc tests/cpp/*.cpp
//           csrc/{os,cpu,process}/*.cpp
//           tests/test_stress.py builds and runs it with sanitizers, other compilers and for Arm.
// Output    a line per part; the first failed check ends it with status 1.

#include "parts.h"
#include "rounds.h"

namespace pyringar::stress {

namespace {

constexpr Part kParts[] = {
    {"half", &half_round, Often::kOnce},
    {"kernels", &kernels_round, Often::kMany},
    {"strided", &strided_round, Often::kMany},
    {"waits", &waits_round, Often::kMany},
    {"stillness", &stillness_round, Often::kMany},
    {"pool", &pool_round, Often::kMany},
    {"turn", &turn_round, Often::kMany},
    {"fused", &fused_round, Often::kMany},
    {"ring", &ring_round, Often::kMany},
    {"direct", &direct_round, Often::kMany},
    {"withheld", &withheld_round, Often::kFew},
    {"group", &group_round, Often::kMany},
    {"late-rank", &late_rank_round, Often::kFew},
    {"async", &async_round, Often::kMany},
    {"two-groups", &two_groups_round, Often::kMany},
    {"float-mode", &float_mode_round, Often::kFew},
    {"no-threads", &no_threads_round, Often::kFew},
    {"packed-line", &flat_view_round, Often::kMany},
    {"processes", &processes_round, Often::kMany},
    {"counters", &process_counters_round, Often::kMany},
    {"mismatch", &process_mismatch_round, Often::kMany},
    {"failures", &process_failures_round, Often::kFew},
};

}  // namespace

}  // namespace pyringar::stress

int main(int argc, char** argv) {
  using namespace pyringar::stress;
  return run_parts(kParts, parse_options(argc, argv));
}
