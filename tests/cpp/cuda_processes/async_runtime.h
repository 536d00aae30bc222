// async_runtime: the part of the CUDA runtime that ranks in processes use, over host memory, as
// late and as far out of order as CUDA allows.
//
// Contract  A stream is a queue. What is enqueued runs when somebody synchronises or asks an event,
//           or now and then in between: streams in any order, each in its own, one entry at a time.
//           An event stands for its last record before a wait was asked for, as CUDA says, so that
//           one which is recorded again too early is another event.
//           Processes are threads that have said become_process(). Shared memory is mapped a second
//           time where it is opened, at another address. Ends the program, beside what CUDA would
//           refuse, where CUDA leaves open what happens: memory freed or events destroyed that
//           others have open, streams that wait for each other, an event that is recorded again
//           before all who opened it have asked to wait for it.
// Threads   any.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace pyringar::stress {

void become_process(int process);  // the calling thread

// How often an entry of a stream runs when another is enqueued: 0 never, else one in so many.
void start_devices(std::uint64_t seed, int one_in);
void run_streams_to_end();
void capture(cudaStream_t stream);  // from now on this one is captured; null: none is
long num_allocations();
long num_events();

// What opening another process's memory gives.
enum class Opening { kWorks, kIsRefused, kGivesOtherMemory };
void set_opening(int process, Opening opening);

}  // namespace pyringar::stress
