// runtime_model: a CUDA runtime without a GPU, which does what CUDA's documents allow and no more:
// the real host code links against it, and tests say what shall go wrong.
//
// Contract  Memory is the host's. Streams are queues that run late and in any order that the
//           documents allow, drawn from a seed; kernels are the engine's own source. What CUDA
//           refuses gets CUDA's error code. What CUDA leaves undefined, or where a program would
//           hang, throws Broken, with the rule:
//
//             order      entries of a stream follow each other, streams do not
//             queue      CUDA_DEVICE_MAX_CONNECTIONS=1: a device's streams run as enqueued
//             default    the null stream and blocking streams wait for each other
//             event      a wait is for the last record before it was asked for
//             race       accesses that no stream order, event or host wait orders; what only may
//                        wait (allocations, frees, loading) orders nothing
//             pageable   the host's pageable memory is read by the call that copies it
//             freed      memory is used by what still runs, or runs later, or is not there
//             peer       kernels reach memory of another device once access to it is enabled and
//                        if its allocator made it for that, of the host's what is pinned
//             capture    calls that are refused while a stream is captured spoil the capture
//             isolation  a capture waits only for events of the same capture
//             joined     streams forked in a capture end in the one that began it
//             replay     graphs run what was captured, with the arguments of then
//             deadlock   malloc and free wait for the device, hosts for streams, streams for
//                        events, words and room. cudaFree waits for peers, too: pytorch 50925
//             resident   blocks that wait are launched cooperatively, and hold their place
//             lazy       the first launch of a kernel, and a question for its attributes, wait
//             context    the first touch of a device makes a context there
//             ipc        memory of another process, and its death
//             word       stream memory operations: written after, awaited before; what comes after
//                        a wait that a host has ended is in no order
//             sticky     after a fault every call fails until the process ends
//             blocking   CUDA_LAUNCH_BLOCKING: every launch waits for its end
// Source    CUDA C++ Programming Guide; Runtime API; Driver API: Stream Memory Operations
// Threads   any; what a thread does comes after what was before it was started. Host threads are
//           processes' main threads where they have said so.
// Tests     tests/test_cuda_emulated.py: engines with planted mistakes, which break rules
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <set>
#include <stdexcept>
#include <string>

namespace pyringar::model {

// A program that CUDA would not run as it was meant.
class Broken : public std::runtime_error {
 public:
  Broken(const std::string& rule, const std::string& text)
      : std::runtime_error(rule + ": " + text), rule(rule) {}
  std::string rule;
};

struct Options {
  int blocks_per_multiprocessor = 1;
  int one_in = 0;                // of enqueued entries, how often another runs at once; 0: never
  bool launch_blocking = false;  // CUDA_LAUNCH_BLOCKING=1
  bool lets_time_pass = false;   // where nothing moves: until kernels give up, else it is broadcast
  bool hosts_see_each_other = false;  // host threads meet by means that are not seen here
  bool loads_eagerly = false;         // kernels (CUDA_MODULE_LOADING=EAGER)
  bool has_one_queue = false;         // a process's streams on a device share one
                                      // (CUDA_DEVICE_MAX_CONNECTIONS=1): they run as enqueued
};

// Forgets all that was.
void start(std::uint64_t seed, const Options& options = {});
void run_to_end();  // everything that was enqueued

void become_process(int process);  // the calling thread and those that it starts, until they end
// What it has enqueued does not run any more, what it still calls does nothing; its memory stays as
// long as others have it open.
void kill_process(int process);
void hold(int process, bool is_held);  // its devices do other work
// Once, before the call into the runtime that this thread makes after so many: another thread runs,
// and is through before this one goes on.
void in_between(int num_calls, std::function<void()> other_thread);
void before_launch(int num_launches, std::function<void()> other_thread);  // the same for launches
void meet_hosts();  // threads were joined, or have waited for each other
void host_reads(const void* memory, std::size_t bytes);
void host_writes(const void* memory, std::size_t bytes);

// Memory that a framework's allocator made, on a device or, -1, on the host; until start().
void show_tensor(const void* memory, std::size_t bytes, int device);
void hide_tensor(const void* memory);
void fault(int device, cudaError_t error);  // sticky, for the calling thread's process
std::set<int> contexts();                   // devices with one, of this process
long num_allocations();                     // of the engine, mapped memory included
long num_events();

// What kernels of one device reach of another's memory.
struct Peers {
  bool reach_each_other = true;
  bool tensors_are_visible = true;
};
inline Peers peers;               // all is reached after start()
bool enable_peers(int a, int b);  // by this process, both ways; false: they do not reach each other

// What the driver refuses a process.
enum class Refused { kNothing, kRegistration, kStreamMemory };
void refuse(int process, Refused what);
void refuse_launch(int process, int after);  // once, after so many others
void show_device(int process, int device);   // CUDA_VISIBLE_DEVICES: this one alone

// What opening another process's memory gives.
enum class Opening { kWorks, kIsRefused, kGivesOtherMemory };
void set_opening(int process, Opening opening);

}  // namespace pyringar::model
