// main: the PTX of the kernels on devices that are a model: every part again and again, with random
// inputs and orders.
//
//   ptx --ptx FOLDER [--trace] [--rounds N | --seconds S] [--seed X] [--only PART] [--from-round R]
//
// Build     g++ -std=c++20 -O2 -ffp-contract=off -Icsrc -Itests/cpp -Itests/cpp/cuda -Itests/ptx
//             tests/ptx/*.cpp tests/cpp/cuda/{fused_test,ring_test,tensors}.cpp
//             tests/cpp/{check,oracle,rounds}.cpp
//           test_ptx.py builds and runs it, and has nvcc write FOLDER/kernels_*.ptx.
// Output    a line per part; the first failed check ends it with status 1.

#include <cstdio>
#include <functional>

#include "emulated.h"
#include "fault.h"
#include "launches.h"
#include "own_tests.h"
#include "rounds.h"

namespace pyringar::ptx {

namespace {

using stress::Often;
using stress::Random;

bool is_traced = false;

// What figure.py reads.
void trace(const Seen& seen) {
  std::printf("seen\t%u\t%llu\t%s\t%s\t%d\n", seen.block,
              static_cast<unsigned long long>(seen.num_instructions), seen.what.c_str(),
              seen.where.c_str(), static_cast<int>(seen.value));
}

void run_on(Chooser& chooser, const Limits& limits, const std::function<void()>& round) {
  begin_round(chooser, limits, is_traced ? &trace : nullptr);
  try {
    round();
  } catch (const Fault& fault) {
    stress::fail_round(fault.what());
  }
  end_round();
}

// Kernels look at the clock every 64 times that they looked at a flag: a rest in between.
constexpr unsigned kLooksBeforeRest = 60;

// Calm machines, and wild ones; few blocks at a time, and many.
void run_on_machine(Random& random, const std::function<void(Random&)>& round) {
  const int one_in = random.one_in(2) ? 4 : random.between(2, 40);
  const auto at_once = static_cast<unsigned>(random.between(1, 6));
  RandomChooser chooser(random.bits(), one_in);
  run_on(chooser, {at_once, kLooksBeforeRest}, [&] { round(random); });
}

template <void (*kRound)(Random&)>
void on_machine(Random& random) {
  run_on_machine(random, kRound);
}

// A machine for each dtype: it remembers all memory of its round.
void fused_all_round(Random& random) {
  for (const DType dtype : stress::kAllDTypes) {
    run_on_machine(random, [&](Random& own) { stress::fused_dtype_round(own, dtype); });
  }
}

// Every order of a tiny ring that leaves the calm one once or, of two ranks, up to three times;
// with the same inputs.
void try_orders(Random& random, int world_size) {
  EveryChooser every(world_size == 2 ? 3 : 1);
  std::size_t num_runs = 0;
  do {
    Random same = random;
    run_on(every, {1, 2}, [&] { stress::ring_tiny_round(same, world_size); });
    ++num_runs;
  } while (every.advance());
  std::printf("%zu orders of a ring of %d\n", num_runs, world_size);
}

void ring_orders_round(Random& random) {
  for (const int world_size : {2, 2, 2, 3, 3, 3}) {
    Random own = random.fork();
    try_orders(own, world_size);
  }
}

// Nobody but the program says what happens.
void ring_picture_round(Random& random) {
  RandomChooser calm(1, 1 << 30);
  run_on(calm, {1, kLooksBeforeRest}, [&] { stress::ring_picture_round(random); });
}

constexpr stress::Part kParts[] = {
    {"litmus", &litmus_round, Often::kOnce},
    {"forms", &forms_round, Often::kOnce},
    {"fused-all", &fused_all_round, Often::kOnce},
    {"fused-mean", &on_machine<&stress::fused_mean_round>, Often::kOnce},
    {"fused", &on_machine<&stress::fused_round>, Often::kMany},
    {"peers", &on_machine<&peers_round>, Often::kFew},
    {"direct-all", &on_machine<&direct_all_round>, Often::kOnce},
    {"direct", &on_machine<&direct_round>, Often::kMany},
    {"ring-all", &on_machine<&stress::ring_all_round>, Often::kOnce},
    {"ring", &on_machine<&stress::ring_round>, Often::kMany},
    {"ring-orders", &ring_orders_round, Often::kOnce},
    {"ring-picture", &ring_picture_round, Often::kOnce},
    {"ring-withheld", &on_machine<&stress::ring_withheld_round>, Often::kFew},
};

int take_option(const std::string& name, const char* value, const stress::Options&) {
  if (name == "--trace") {
    is_traced = true;
    return 1;
  }
  if (name != "--ptx") return 0;
  open_kernels(value);
  return 2;
}

int run(int argc, char** argv) {
  const stress::Options options = stress::parse_options(argc, argv, &take_option);
  const stress::Stopwatch stopwatch;
  const int status = stress::run_parts(kParts, options);
  const auto millions = static_cast<double>(num_instructions()) / 1e6;
  if (millions == 0) return status;
  std::printf("%.1f million instructions of warps, %.1f million a second\n", millions,
              millions / stopwatch.seconds());
  return status;
}

}  // namespace

}  // namespace pyringar::ptx

int main(int argc, char** argv) { return pyringar::ptx::run(argc, argv); }
