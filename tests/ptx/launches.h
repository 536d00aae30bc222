// launches: what main.cpp says before a round of the emulated kernels' tests, with kernels in PTX.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "chooser.h"
#include "cuda_emulator.h"
#include "machine.h"

namespace pyringar::ptx {

// The folder of kernels_*.ptx.
void open_kernels(const std::string& folder);
void begin_round(Chooser& chooser, const Limits& limits, Observer observer);
void end_round();
std::uint64_t num_instructions();  // of warps, over all rounds

void enqueue(std::size_t stream, const emulator::Launch& launch);
void run_enqueued();

// For what the tests of tests/cpp/cuda do not have.
Machine& machine();
const Kernel& find_kernel(const std::string& stem, const std::string& word);

}  // namespace pyringar::ptx
