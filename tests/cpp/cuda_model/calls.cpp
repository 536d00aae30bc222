// calls: devices, streams, events and launches of the modelled runtime.
//
// Contract  the rules of runtime_model.h.
#include <algorithm>
#include <optional>

#include "cuda/args.h"
#include "cuda/kernels.h"
#include "cuda/table.h"
#include "machine.h"

namespace pyringar::model {

namespace {

thread_local cudaError_t last_error = cudaSuccess;

struct EventHandle {
  EventPtr state;
  int process;
};

EventHandle& handle_of(cudaEvent_t event) { return *reinterpret_cast<EventHandle*>(event); }

struct Identity {
  DType dtype;
  cuda::KernelKind kind;
};

// Return dtype and kind of an engine kernel; nullopt for any other function.
std::optional<Identity> identify(const void* kernel) {
  for (int i = 0; i < kNumDTypes * kNumReduceOps * cuda::kNumKernelKinds; ++i) {
    const auto kind = static_cast<cuda::KernelKind>(i % cuda::kNumKernelKinds);
    const auto op = static_cast<ReduceOp>(i / cuda::kNumKernelKinds % kNumReduceOps);
    const auto dtype = static_cast<DType>(i / cuda::kNumKernelKinds / kNumReduceOps);
    for (const Order order : {Order::kRank, Order::kTree}) {
      for (const int divisor : {1, 3}) {  // a mean that must divide has a separate kernel
        const Fold fold{op, divisor, order};
        if (cuda::kernel_function(dtype, fold, kind) == kernel) return Identity{dtype, kind};
      }
    }
  }
  return {};
}

// Return a kernel call that holds a copy of its argument, as a CUDA launch does.
template <typename T>
std::function<void()> bound(const void* kernel, const T& argument) {
  const auto function = reinterpret_cast<void (*)(T)>(const_cast<void*>(kernel));
  return [function, copied = std::make_shared<T>(argument)] { function(*copied); };
}

template <typename T>
void touch_table(const T& table, std::size_t item, std::vector<Access>& accesses) {
  const cuda::TableView view = table.view();
  for (std::uint32_t s = 0; s < view.num_entries; ++s) {
    const cuda::TableEntry& entry = view.entries[s];
    const std::size_t bytes = entry.numel * item;
    for (int i = 0; i < view.num_sources; ++i) {
      accesses.push_back(access(view.pointers[entry.sources + i], bytes, Touch::kRead));
    }
    for (int i = 0; i < view.num_destinations; ++i) {
      accesses.push_back(access(view.pointers[entry.destinations + i], bytes, Touch::kWrite));
    }
  }
}

// Flags order the accesses to slots, so the model checks only that the slots are allocated.
void touch_ring(const cuda::RingArgs& args, unsigned num_blocks, std::size_t item,
                std::vector<Access>& accesses) {
  const auto num_local = num_blocks / static_cast<unsigned>(args.num_channels);
  const auto channels = static_cast<std::size_t>(args.num_channels);
  for (unsigned i = 0; i < num_local; ++i) {
    const cuda::RingPorts& ports = args.ports[i];
    const auto chunk = chunk_range(args.numel, args.world_size, args.rank[i]).size();
    const auto bytes_of = [&](RingPhases one_chunk) {
      return (args.phases == one_chunk ? chunk : args.numel) * item;
    };
    accesses.push_back(access(args.input[i], bytes_of(RingPhases::kAllGather), Touch::kRead));
    accesses.push_back(access(args.output[i], bytes_of(RingPhases::kReduceScatter), Touch::kWrite));
    const std::size_t slots = channels * args.num_slots * args.slot_bytes;
    accesses.push_back(access(ports.in_slots, slots, Touch::kFlags));
    accesses.push_back(access(ports.out_slots, slots, Touch::kFlags));
    const std::size_t flag_bytes = channels * cuda::kFlagBytes;
    accesses.push_back(access(ports.in_flag, flag_bytes, Touch::kFlags));
    accesses.push_back(access(ports.out_taken, flag_bytes, Touch::kFlags));
    // Recorded as a write, so that the model reports concurrent launches of a ring.
    accesses.push_back(access(ports.base, flag_bytes, Touch::kWrite));
  }
  accesses.push_back(access(args.ports, num_local * sizeof(cuda::RingPorts), Touch::kRead));
  accesses.push_back(access(args.patience.gave_up, 4, Touch::kFlags));
  accesses.push_back(access(args.patience.failure, sizeof(cuda::Failure), Touch::kFlags));
}

cudaError_t launch(const void* kernel, dim3 blocks, dim3 threads, void** arguments,
                   cudaStream_t stream, bool is_cooperative) {
  host().before_launch.run_if_due();
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  Machine& machine = call.machine();
  const std::optional<Identity> what = identify(kernel);
  if (!what) return error(cudaErrorInvalidDeviceFunction);
  int& launches_left = call.process().launches_left;
  if (launches_left >= 0 && launches_left-- == 0) return error(cudaErrorLaunchOutOfResources);
  StreamState* state = machine.state_of(stream);
  if (state->device != current_device()) return error(cudaErrorInvalidResourceHandle);
  const auto most =
      static_cast<unsigned>(kMultiprocessors * machine.options.blocks_per_multiprocessor);
  if (is_cooperative && blocks.x > most) return error(cudaErrorCooperativeLaunchTooLarge);
  if (state->capture == nullptr) machine.load(call.lock(), kernel, state->device);
  const std::size_t item = item_bytes(what->dtype);
  const bool is_ring = what->kind == cuda::KernelKind::kRing;
  StreamWork work{StreamWork::Kind::kRun, join("a launch of ", is_ring ? "ring" : "fused")};
  work.kernel = kernel;
  emulator::Launch entry{blocks.x, threads.x, {}, state->device};
  const auto fuse = [&](const auto& table) {
    entry.kernel = bound(kernel, table);
    touch_table(table, item, work.accesses);
    work.run = [entry] { emulator::run_sequentially(entry); };
  };
  if (is_ring) {
    if (!is_cooperative) {
      throw Broken("resident", "blocks wait in a launch that is not cooperative");
    }
    const auto& args = *static_cast<cuda::RingArgs*>(arguments[0]);
    entry.num_threads = cuda::kThreads;
    entry.kernel = bound(kernel, args);
    touch_ring(args, blocks.x, item, work.accesses);
    work.kind = StreamWork::Kind::kGrid;
    work.launch = std::move(entry);
  } else if (what->kind == cuda::KernelKind::kFusedSmall) {
    fuse(*static_cast<cuda::SmallTable*>(arguments[0]));
  } else {
    fuse(*static_cast<cuda::LargeTable*>(arguments[0]));
  }
  const cudaError_t status = machine.enqueue(state, std::move(work));
  if (machine.options.launch_blocking && state->capture == nullptr) {
    machine.wait_for(call.lock(), "CUDA_LAUNCH_BLOCKING",
                     [=](const StreamState& other) { return &other == state; });
  }
  return error(status);
}

// As in CUDA, an event recorded during a capture cannot be queried or synchronized.
cudaError_t check_event(const RuntimeCall& call, const EventState& event) {
  if (event.capture == nullptr || call.fault() != cudaSuccess) return call.check_unsafe();
  if (!event.capture->is_over) call.machine().invalidate(*event.capture, cudaErrorCapturedEvent);
  return error(cudaErrorCapturedEvent);
}

}  // namespace

cudaError_t error(cudaError_t status) {
  if (status != cudaSuccess) last_error = status;
  return status;
}

}  // namespace pyringar::model

using namespace pyringar;
using namespace pyringar::model;

extern "C" {

// -- devices --------------------------------------------------------------------------------------

cudaError_t cudaGetDevice(int* device) {
  RuntimeCall call(RuntimeCall::Touches::kNothing);
  return *device = current_device(), cudaSuccess;
}
// As in CUDA 12.0 and later, create a context. Replace the top of the driver's context stack.
cudaError_t cudaSetDevice(int device) {
  RuntimeCall call(RuntimeCall::Touches::kNothing);
  if (device < 0 || device >= kDevices) {
    return error(cudaErrorInvalidDevice);
  }
  (host().pushed.empty() ? host().device : host().pushed.back()) = device;
  call.process().contexts.insert(device);
  return call.fault();
}
cudaError_t cudaGetDeviceCount(int* count) {
  RuntimeCall call(RuntimeCall::Touches::kNothing);
  return *count = kDevices, cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t sticky = RuntimeCall(RuntimeCall::Touches::kNothing).fault();
  return sticky != cudaSuccess ? sticky : std::exchange(last_error, cudaSuccess);
}
const char* cudaGetErrorString(cudaError_t) { return "refused"; }
const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  RuntimeCall call(RuntimeCall::Touches::kNothing);
  return *value = kMultiprocessors, call.fault();
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* lowest, int* highest) {
  RuntimeCall call;
  return *lowest = *highest = 0, call.fault();
}

// -- streams --------------------------------------------------------------------------------------

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  const bool is_blocking = flags != cudaStreamNonBlocking;
  StreamState* made = call.machine().make_stream(host().process, current_device(), is_blocking);
  return *stream = reinterpret_cast<cudaStream_t>(made), cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
// As in CUDA, work that is enqueued already still runs.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  RuntimeCall call;
  call.machine().state_of(stream)->is_destroyed = true;
  return call.fault();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  StreamState* state = call.machine().state_of(stream);
  if (state->capture != nullptr) {
    return error(call.machine().invalidate(*state->capture, cudaErrorStreamCaptureUnsupported));
  }
  if (const cudaError_t refused = call.check_unsafe()) return refused;
  call.machine().wait_for(call.lock(), "cudaStreamSynchronize",
                          [=](const StreamState& other) { return &other == state; });
  return cudaSuccess;
}

// -- launches -------------------------------------------------------------------------------------

cudaError_t cudaLaunchKernel(const void* kernel, dim3 blocks, dim3 threads, void** arguments,
                             std::size_t, cudaStream_t stream) {
  return launch(kernel, blocks, threads, arguments, stream, false);
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 blocks, dim3 threads,
                                        void** arguments, std::size_t, cudaStream_t stream) {
  return launch(kernel, blocks, threads, arguments, stream, true);
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int,
                                                          std::size_t) {
  RuntimeCall call;
  return *blocks = call.machine().options.blocks_per_multiprocessor, call.fault();
}
// As in CUDA, this query loads the kernel on the current device.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  RuntimeCall call;
  if (const cudaError_t refused = call.check_unsafe()) return refused;
  *attributes = {};
  call.machine().load(call.lock(), kernel, current_device());
  return cudaSuccess;
}

// -- events ---------------------------------------------------------------------------------------

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  call.process().num_events += 1;
  const int process = host().process;
  auto* made = new EventHandle{std::make_shared<EventState>(EventState{current_device()}), process};
  return *event = reinterpret_cast<cudaEvent_t>(made), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  RuntimeCall call;
  call.machine().processes[handle_of(event).process].num_events -= 1;
  delete &handle_of(event);
  return call.fault();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  const EventPtr& state = handle_of(event).state;
  StreamState* on = call.machine().state_of(stream);
  if (on->device != state->device) return error(cudaErrorInvalidResourceHandle);
  state->capture = on->capture;
  if (on->capture != nullptr) {
    state->nodes = on->nodes;
    return on->capture->is_invalid ? error(cudaErrorStreamCaptureInvalidated) : cudaSuccess;
  }
  StreamWork work{StreamWork::Kind::kRecord, "a record"};
  work.event = state;
  work.record = ++state->recorded;
  return error(call.machine().enqueue(on, std::move(work)));
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  const EventPtr& state = handle_of(event).state;
  StreamState* on = call.machine().state_of(stream);
  if (state->capture != nullptr) {
    if (state->capture->is_over) return error(cudaErrorCapturedEvent);
    if (stream == nullptr) {
      return error(call.machine().invalidate(*state->capture, cudaErrorStreamCaptureImplicit));
    }
    if (on->capture != nullptr && on->capture != state->capture) {
      return error(call.machine().invalidate(*on->capture, cudaErrorStreamCaptureMerge));
    }
    on->capture = state->capture;
    on->capture->streams.insert(on);
    on->nodes.insert(state->nodes.begin(), state->nodes.end());
    return cudaSuccess;
  }
  if (state->recorded == 0) return cudaSuccess;
  if (on->capture != nullptr) {
    return error(call.machine().invalidate(*on->capture, cudaErrorStreamCaptureIsolation));
  }
  StreamWork work{StreamWork::Kind::kWait, "a wait for an event"};
  work.event = state;
  work.record = state->recorded;
  return error(call.machine().enqueue(on, std::move(work)));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  RuntimeCall call;
  Machine& machine = call.machine();
  const EventState& state = *handle_of(event).state;
  if (const cudaError_t refused = check_event(call, state)) return refused;
  for (int i = 0; i < 20; ++i) machine.step();
  if (!has_come_to(state, state.recorded)) return error(cudaErrorNotReady);
  if (state.recorded > 0) machine.host_clock().join_times(state.clocks.at(state.recorded));
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  RuntimeCall call;
  Machine& machine = call.machine();
  const EventPtr state = handle_of(event).state;
  if (const cudaError_t refused = check_event(call, *state)) return refused;
  const std::uint64_t wanted = state->recorded;
  machine.run_until(call.lock(), "cudaEventSynchronize",
                    [&] { return has_come_to(*state, wanted); });
  if (wanted > 0) machine.host_clock().join_times(state->clocks.at(wanted));
  return cudaSuccess;
}

}  // extern "C"
