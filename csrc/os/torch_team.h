// torch_team: the OpenMP threads with which torch computes, joined for one loop.
//
// Contract  After an operation torch's threads spin for milliseconds, each on a core, where a
//           helper of ours would have to wait. try_run(work) calls work(thread, num_threads) on all
//           of them, the caller being thread 0, in IEEE's default mode. It returns when all calls
//           have, and throws the first exception. It asks for torch's number of threads, since
//           libgomp ends and starts threads where that changes; it may get fewer.
// Threads   any. One region at a time in the process: two teams are more threads than cores.
// Forks     a forked process has no team: its threads stayed behind.
// Tests     tests/test_torch_team.py
#pragma once

#include <functional>

namespace pyringar {

// What goes on while a call runs: its caller waits for it, or torch may compute.
enum class CallMode { kBlocking, kBackground };

}  // namespace pyringar

namespace pyringar::torch_team {

// How many threads an operation of torch's has at most in this thread (torch.set_num_threads, and
// OMP_THREAD_LIMIT); 1 inside of a parallel region; 0 where no torch is loaded.
int num_threads();

// Whether this thread's team has two threads at least, and they are awake or have never worked for
// us. Waking them costs up to milliseconds. Asked once for each job: two system calls.
bool is_ready();

// False, and nothing done, where another thread has its team at work. Only where is_ready().
bool try_run(const std::function<void(int thread, int num_threads)>& work);

}  // namespace pyringar::torch_team
