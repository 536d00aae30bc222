// runtime_model: a CUDA runtime without a GPU, for tests of the real host code. It allows every
// behavior that CUDA documents, and no other.
//
// Contract  Device memory is host memory. Streams run late and in random order. Kernels are the
//           engine's own source. Refused calls return CUDA's error codes. Undefined behavior and
//           deadlocks throw Broken, with the rule:
//
//             order      entries of a stream run in order, streams run concurrently
//             queue      CUDA_DEVICE_MAX_CONNECTIONS=1: a device's streams run as enqueued
//             default    the null stream and blocking streams wait for each other
//             event      a wait is for the last record before it
//             race       two accesses that no stream, event or host wait orders. Allocations,
//                        frees and loads may wait, but order nothing
//             pageable   a copy reads pageable host memory during the call
//             freed      memory is used while not allocated, or freed while used
//             peer       kernels access a peer's memory only if access is enabled and its
//                        allocator allows it, and host memory only if it is pinned
//             capture    refused calls during a capture invalidate it
//             isolation  a capture waits only for events of the same capture
//             joined     streams forked in a capture rejoin its first stream
//             replay     graphs use the arguments of the capture
//             deadlock   malloc and free wait for the device, hosts for streams, streams for
//                        events, words and space. cudaFree waits for peers too: pytorch 50925
//             resident   waiting blocks need a cooperative launch, and keep their space
//             lazy       a kernel's first launch or attribute query waits for its loading
//             context    the first use of a device makes a context
//             ipc        memory of other processes, and their death
//             word       stream memory operations. Work after a wait that a host has released
//                        has no order
//             sticky     after a fault every call of the process fails
//             blocking   CUDA_LAUNCH_BLOCKING: every launch waits for its kernel
// Source    CUDA C++ Programming Guide; Runtime API; Driver API: Stream Memory Operations
// Threads   any. Threads are ordered after their creation. become_process() gives a thread a
//           process.
// Tests     tests/test_cuda_emulated.py: engines with planted mistakes
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>

namespace pyringar::model {

class Broken : public std::runtime_error {
 public:
  Broken(const std::string& rule, const std::string& text)
      : std::runtime_error(rule + ": " + text), rule(rule) {}
  std::string rule;
};

struct Options {
  int blocks_per_multiprocessor = 1;
  int one_in = 0;  // chance 1/one_in that an enqueue runs another entry at once; 0: never
  bool launch_blocking = false;  // CUDA_LAUNCH_BLOCKING=1
  // If nothing can run: true lets time pass until kernels time out, false reports a deadlock.
  bool lets_time_pass = false;
  bool hosts_see_each_other = false;  // host threads synchronize in ways the model does not see
  bool loads_eagerly = false;         // CUDA_MODULE_LOADING=EAGER
  bool has_one_queue = false;         // CUDA_DEVICE_MAX_CONNECTIONS=1
};

void start(std::uint64_t seed, const Options& options = {});
void run_to_end();  // runs all enqueued work

void become_process(int process);  // for the calling thread and threads that it starts
// Drop the process's enqueued work, and ignore its later calls. Its memory stays while mapped.
void kill_process(int process);
void hold(int process, bool is_held);  // true: its devices run nothing, as if busy
// After num_calls runtime calls of this thread, run other_thread once, before the next call.
void in_between(int num_calls, std::function<void()> other_thread);
void before_launch(int num_launches, std::function<void()> other_thread);  // counts launches only
void meet_hosts();  // synchronizes all host threads
void host_reads(const void* memory, std::size_t bytes);
void host_writes(const void* memory, std::size_t bytes);

// Register memory of a framework's allocator until start(). device -1: the host.
void show_tensor(const void* memory, std::size_t bytes, int device);
void hide_tensor(const void* memory);
void fault(int device, cudaError_t error);  // sticky error of this process
std::set<int> contexts();                   // devices with a context of this process
long num_allocations();                     // of the engine, with mappings
long num_events();

struct Peers {
  bool reach_each_other = true;
  bool tensors_are_visible = true;
};
inline Peers peers;               // reset by start()
bool enable_peers(int a, int b);  // in both directions, in this process; false: refused

enum class Refused { kNothing, kRegistration, kStreamMemory };
void refuse(int process, Refused what);
void refuse_launch(int process, int after);  // one launch, after `after` launches
void show_device(int process, int device);   // CUDA_VISIBLE_DEVICES: only this device

enum class Opening { kWorks, kIsRefused, kGivesOtherMemory };
void set_opening(int process, Opening opening);

}  // namespace pyringar::model
