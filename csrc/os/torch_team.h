// torch_team: runs a loop on the OpenMP threads of torch.
// Contract  After an operation the OpenMP threads spin for milliseconds, each on a core, and slow
//           down other threads. try_run(work) calls work(thread, num_threads) on all of them, in
//           IEEE default mode; the caller is thread 0. It returns after all calls and throws the
//           first exception. It asks for torch's number of threads, since libgomp ends and starts
//           threads if the number changes. OpenMP may give fewer.
// Threads   Any. One region at a time in the process: two teams would outnumber the cores.
// Forks     A forked process has no team: its threads exist only in the parent.
// Tests     tests/test_torch_team.py
#pragma once

#include <functional>

namespace pyringar {

// kBlocking: the caller waits for the call. kBackground: torch may compute meanwhile.
enum class CallMode { kBlocking, kBackground };

}  // namespace pyringar

namespace pyringar::torch_team {

// Return how many threads a torch operation in this thread may use (torch.set_num_threads and
// OMP_THREAD_LIMIT); 1 inside a parallel region; 0 if torch is not loaded.
int num_threads();

// Return true if this thread's OpenMP team has at least two threads, and they are awake or were
// never used here. Waking them takes up to milliseconds. Two system calls: call it once per job.
bool is_ready();

// Run work on the team, or return false without running it if another thread uses its team. Call it
// only after is_ready() returned true.
bool try_run(const std::function<void(int thread, int num_threads)>& work);

}  // namespace pyringar::torch_team
