// fake_runtime: devices of CPU threads, for the host side of the CUDA engine.
#pragma once

#include "check.h"
#include "cuda_emulator.h"

namespace pyringar::stress {

void use_delays(Random* random);
void run_queues();  // everything that was enqueued, on all devices at once

// What the probe of peers would find.
struct Peers {
  bool reach_each_other = true;
  bool tensors_are_visible = true;
};
inline Peers peers;

}  // namespace pyringar::stress
