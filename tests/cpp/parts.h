// parts: the parts of the stress test; each call is one round with inputs of its own.
//
// Contract  A round leaves no thread behind and needs no other round before it.
#pragma once

#include "check.h"

namespace pyringar::stress {

void half_round(Random& random);       // core/half.h and cpu/lanes.h
void kernels_round(Random& random);    // cpu/kernels.h
void strided_round(Random& random);    // cpu/strided.h
void waits_round(Random& random);      // os/wait.h
void stillness_round(Random& random);  // os/stillness.h
void pool_round(Random& random);       // os/thread_pool.h
void turn_round(Random& random);       // os/turn.h, os/work_queue.h
void fused_round(Random& random);      // cpu/fused.h
void ring_round(Random& random);       // cpu/ring.h
void direct_round(Random& random);     // cpu/direct.h
void withheld_round(Random& random);   // ring and direct with a rank that does not come
void group_round(Random& random);      // cpu/group.h, one call after the other
void late_rank_round(Random& random);  // a Group's timeout, and what it does afterwards
void async_round(Random& random);      // a Group's queue, many threads, close
void two_groups_round(Random& random);
void float_mode_round(Random& random);        // a caller that flushes denormals and rounds upwards
void no_threads_round(Random& random);        // the system refuses threads
void flat_view_round(Random& random);         // process/flat_view.h
void processes_round(Random& random);         // process/group.h, a thread per rank
void process_counters_round(Random& random);  // the same, where counters wrap
void process_mismatch_round(Random& random);  // a rank that calls something else
void process_failures_round(Random& random);  // ranks that stay away or leave

}  // namespace pyringar::stress
