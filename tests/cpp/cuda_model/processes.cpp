// processes: death of modelled processes, and operations that the driver refuses.
//
// Contract  the rule "ipc" of runtime_model.h. A new thread belongs to its creator's process.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "machine.h"

namespace pyringar::model {

namespace {

ProcessState& state_of(int process) { return Machine::get().processes[process]; }

struct Start {
  void* (*routine)(void*);
  void* argument;
  int process;
  Clock clock;
};

// Start a thread whose accesses are ordered after its creation.
void* begin_thread(void* raw) {
  const std::unique_ptr<Start> own(static_cast<Start*>(raw));
  const Start& start = *own;
  if (start.process >= 0) become_process(start.process);
  {
    const std::lock_guard lock(Machine::get().mutex);
    Machine::get().host_clock().join(start.clock);
  }
  return start.routine(start.argument);
}

}  // namespace

void close_opened(Machine& machine, std::uintptr_t at) {
  const Allocation opened = machine.memory.at(at);
  Allocation& shown = machine.memory.at(opened.opened_from);
  shown.num_mapped -= 1;
  munmap(reinterpret_cast<void*>(at), opened.bytes);
  ::close(opened.fd);
  machine.memory.erase(at);
  if (shown.num_mapped == 0 && !machine.processes[shown.process].is_alive) {
    ::close(shown.fd);
    machine.memory.erase(opened.opened_from);
  }
}

void kill_process(int process) {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  state_of(process).is_alive = false;
  std::erase_if(machine.running,
                [&](const Running& one) { return one.stream->process == process; });
  std::erase_if(machine.graph_runs,
                [&](const auto& run) { return run->stream->process == process; });
  for (auto& stream : machine.streams) {
    if (stream->process != process) continue;
    stream->entries.clear();
    stream->is_busy = false;
  }
  std::vector<std::uintptr_t> opened;
  for (const auto& [at, allocation] : machine.memory) {
    if (allocation.process == process && allocation.opened_from != 0) opened.push_back(at);
  }
  for (const std::uintptr_t at : opened) close_opened(machine, at);
  // The dead process's memory stays mapped here: its threads may still read it.
  std::erase_if(machine.memory, [&](const auto& entry) {
    const Allocation& allocation = entry.second;
    return allocation.process == process && !allocation.is_tensor && allocation.num_mapped == 0;
  });
}

void hold(int process, bool is_held) {
  const std::lock_guard lock(Machine::get().mutex);
  state_of(process).is_held = is_held;
}

void refuse(int process, Refused what) {
  const std::lock_guard lock(Machine::get().mutex);
  state_of(process).refused = what;
}

void refuse_launch(int process, int after) {
  const std::lock_guard lock(Machine::get().mutex);
  state_of(process).launches_left = after;
}

bool enable_peers(int a, int b) {
  const std::lock_guard lock(Machine::get().mutex);
  if (peers.reach_each_other) {
    state_of(host().process).reached.insert({{a, b}, {b, a}});
  }
  return peers.reach_each_other;
}

void show_device(int process, int device) {
  const std::lock_guard lock(Machine::get().mutex);
  state_of(process).visible_device = device;
}

}  // namespace pyringar::model

using namespace pyringar::model;

extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*routine)(void*),
                   void* argument) {
  static const auto create =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  const int process = host().is_registered ? host().process : -1;
  const std::lock_guard lock(Machine::get().mutex);
  return create(thread, attributes, &begin_thread,
                new Start{routine, argument, process, Machine::get().host_clock()});
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  const RuntimeCall call;
  std::snprintf(id, static_cast<std::size_t>(length), "0000:%02X:00.0", device);
  return call.fault();
}
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id) {
  const RuntimeCall call(RuntimeCall::Touches::kNothing);
  *device = static_cast<int>(std::strtol(id + 5, nullptr, 16));
  const int visible = call.process().visible_device;
  return visible < 0 || visible == *device ? cudaSuccess : error(cudaErrorInvalidDevice);
}

}  // extern "C"
