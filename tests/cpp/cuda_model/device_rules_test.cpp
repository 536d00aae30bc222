// device_rules_test: rules of memory, devices and processes.

#include <functional>
#include <utility>

#include "rules.h"

namespace pyringar::model {

namespace {

// -- memory ---------------------------------------------------------------------------------------

void check_freed() {
  std::vector<char> tensor(kBytes);
  const auto show = [&] { show_tensor(tensor.data(), kBytes, 0); };
  const cudaStream_t stream = stream_on(0);
  for (const bool starts_again : {false, true}) {
    show();
    breaks("freed", "still used by a memset", [&] {
      set(tensor.data(), 1, stream);
      hide_tensor(tensor.data());
      starts_again ? start(1) : static_cast<void>(cudaGetLastError());
      CHECK(false, "the next call does not tell");
    });
  }
  show();
  Waiting waiting;
  waiting.args.output[0] = tensor.data();
  breaks("freed", "still used by a launch of ring", [&] {
    waiting.run(stream);
    hide_tensor(tensor.data());
  });
  breaks("freed", "not allocated", [&] { set(tensor.data(), 1, stream); });
  void* memory = nullptr;
  ok(cudaMalloc(&memory, kBytes));
  ok(cudaFree(memory));
  breaks("freed", "freed what is not allocated", [&] { cudaFree(memory); });
  breaks("freed", "freed what is not allocated", [&] { cudaFreeHost(waiting.input); });
}

// cudaFreeHost waits or does not: one is told as a deadlock, the other as memory that is in use.
void check_free_host() {
  std::set<std::string> broken_rules;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    start(seed);
    Waiting waiting;
    void* pinned = nullptr;
    ok(cudaHostAlloc(&pinned, kBytes, cudaHostAllocDefault));
    waiting.args.output[0] = pinned;
    waiting.run(stream_on(0));
    try {
      cudaFreeHost(pinned);
    } catch (const Broken& broken) {
      broken_rules.insert(broken.rule);
    }
    drop_work();
    ok(cudaFreeHost(pinned));
  }
  CHECK((broken_rules == std::set<std::string>{"deadlock", "freed"}), broken_rules.size());
}

// Read by the call itself.
void check_pageable() {
  Memory memory;
  std::vector<char> from(kBytes, 1);
  ok(cudaMemcpyAsync(memory, from.data(), kBytes, cudaMemcpyDefault, stream_on(0)));
  from.assign(kBytes, 2);
  run_to_end();
  CHECK(memory.first() == 1, "pageable memory was read late");
}

void check_peers() {
  Memory here(0);
  Memory there(1);
  const cudaStream_t stream = stream_on(0);
  std::vector<char> tensor(kBytes);
  void* pinned = nullptr;
  ok(cudaHostAlloc(&pinned, kBytes, cudaHostAllocDefault));
  const auto writes = [&](void* to) { return [&, to] { ok(launch_plain(stream, here, to)); }; };
  writes(pinned)();
  breaks("peer", "is no peer", writes(there));
  ok(cudaMemcpyAsync(there, here, kBytes, cudaMemcpyDefault, stream));  // goes everywhere
  CHECK(enable_peers(0, 1), "peers do not reach each other");
  show_tensor(tensor.data(), kBytes, 1);
  writes(there)();
  writes(tensor.data())();
  run_to_end();
  peers.tensors_are_visible = false;
  writes(there)();
  breaks("peer", "peers do not see it", writes(tensor.data()));
  show_tensor(tensor.data(), kBytes, -1);
  breaks("peer", "pageable", writes(tensor.data()));
  peers.reach_each_other = false;
  Memory far(2);
  ok(cudaSetDevice(0));
  CHECK(!enable_peers(0, 2), "peers reach each other");
  breaks("peer", "is no peer", writes(far));
  ok(cudaFreeHost(pinned));
}

// -- devices --------------------------------------------------------------------------------------

void check_contexts() {
  int device = -1;
  ok(cudaGetDevice(&device));
  CHECK(device == 0 && contexts().empty(), "a question made a context");
  ok(cudaSetDevice(3));
  CHECK((contexts() == std::set<int>{3}), "cudaSetDevice made none");
  on_thread([] {
    cudaStream_t stream = nullptr;
    ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  });
  CHECK((contexts() == std::set<int>{0, 3}), "the first touch made none");
  on_thread([] {
    CUcontext context = nullptr;
    driver_call<CUresult (*)(CUcontext*, CUdevice)>("cuDevicePrimaryCtxRetain")(&context, 5);
    driver_call<CUresult (*)(CUcontext)>("cuCtxPushCurrent")(context);
    int current = -1;
    ok(cudaGetDevice(&current));
    CHECK(current == 5, "pushed, and not current");
    driver_call<CUresult (*)(CUcontext*)>("cuCtxPopCurrent")(nullptr);
    breaks("context", "popped",
           [] { driver_call<CUresult (*)(CUcontext*)>("cuCtxPopCurrent")(nullptr); });
  });
  CHECK((contexts() == std::set<int>{0, 3, 5}), "retained, and there is none");
}

void check_sticky() {
  Memory memory;
  void* pinned = nullptr;
  ok(cudaHostAlloc(&pinned, 1, 0));
  const cudaStream_t stream = stream_on(0);
  cudaEvent_t event = nullptr;
  ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  fault(0, cudaErrorIllegalAddress);
  void* made = nullptr;
  int number = 0;
  cudaIpcMemHandle_t memory_handle{};
  cudaIpcEventHandle_t event_handle{};
  const std::function<cudaError_t()> calls[] = {
      [&] { return cudaMemsetAsync(memory, 1, kBytes, stream); },
      [&] { return launch_plain(stream, memory, memory); },
      [&] { return cudaGetLastError(); },
      [&] { return cudaGetLastError(); },
      [&] { return cudaStreamSynchronize(stream); },
      [&] { return cudaDeviceSynchronize(); },
      [&] { return cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, 0); },
      [&] { return load(plain_kernel()); },
      [&] { return cudaMalloc(&made, 1); },
      [&] { return cudaFreeHost(pinned); },
      [&] { return cudaHostRegister(&number, 4, 0); },
      [&] { return cudaHostUnregister(&number); },
      [&] { return cudaIpcGetMemHandle(&memory_handle, memory); },
      [&] { return cudaIpcOpenMemHandle(&made, memory_handle, 0); },
      [&] { return cudaIpcCloseMemHandle(made); },
      [&] { return cudaIpcGetEventHandle(&event_handle, event); },
      [&] { return cudaIpcOpenEventHandle(&event, event_handle); },
      [&] { return cudaEventRecord(event, stream); },
      [&] { return cudaEventQuery(event); },
      [&] { return cudaEventSynchronize(event); },
      [&] { return cudaEventDestroy(event); },
      [&] { return cudaStreamDestroy(stream); },
      [&] { return cudaFree(std::exchange(memory.data, nullptr)); }};
  for (const auto& call : calls) is(call(), cudaErrorIllegalAddress);
}

void check_sticky_graphs() {
  const cudaStream_t stream = stream_on(0);
  const auto mode = cudaStreamCaptureModeRelaxed;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaUserObject_t object = nullptr;
  ok(cudaStreamBeginCapture(stream, mode));
  ok(cudaStreamEndCapture(stream, &graph));
  ok(cudaGraphInstantiate(&exec, graph, 0));
  ok(cudaUserObjectCreate(&object, nullptr, [](void*) {}, 1, 0));
  ok(cudaStreamBeginCapture(stream, mode));
  fault(0, cudaErrorIllegalAddress);
  cudaGraph_t none = nullptr;
  cudaGraphExec_t made = nullptr;
  cudaUserObject_t other = nullptr;
  const std::function<cudaError_t()> calls[] = {
      [&] { return cudaStreamEndCapture(stream, &none); },
      [&] { return cudaStreamBeginCapture(stream, mode); },
      [&] { return cudaUserObjectCreate(&other, nullptr, nullptr, 1, 0); },
      [&] { return cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove); },
      [&] { return cudaUserObjectRelease(object, 1); },
      [&] { return cudaGraphInstantiate(&made, graph, 0); },
      [&] { return cudaGraphLaunch(exec, stream); },
      [&] { return cudaGraphExecDestroy(exec); },
      [&] { return cudaGraphDestroy(graph); }};
  for (const auto& call : calls) is(call(), cudaErrorIllegalAddress);
}

// -- processes ------------------------------------------------------------------------------------

template <typename Program>
void in_process(int process, Program&& program) {
  on_thread([&] {
    become_process(process);
    program();
  });
}

void check_processes() {
  Event event(0, cudaEventDisableTiming | cudaEventInterprocess);
  Memory memory;
  set(memory, 5, nullptr);
  cudaIpcEventHandle_t event_handle;
  cudaIpcMemHandle_t memory_handle;
  ok(cudaIpcGetEventHandle(&event_handle, event.event));
  ok(cudaIpcGetMemHandle(&memory_handle, memory));
  void* own = nullptr;
  is(cudaIpcOpenMemHandle(&own, memory_handle, 0), cudaErrorInvalidValue);
  cudaEvent_t timed = nullptr;
  is(cudaEventCreateWithFlags(&timed, cudaEventInterprocess), cudaErrorInvalidValue);
  ok(cudaEventRecord(event.event, nullptr));
  in_process(1, [&] {
    cudaEvent_t opened = nullptr;
    ok(cudaIpcOpenEventHandle(&opened, event_handle));
    void* mapped = nullptr;
    ok(cudaIpcOpenMemHandle(&mapped, memory_handle, cudaIpcMemLazyEnablePeerAccess));
    CHECK(mapped != memory.data, "the same address in another process");
    const cudaStream_t stream = stream_on(0);
    breaks("race", "unordered", [&] { set(mapped, 6, stream); });
    ok(cudaEventRecord(event.event, nullptr));
    ok(cudaStreamWaitEvent(stream, opened, 0));
    set(mapped, 6, stream);
    breaks("freed", "still used by a memset", [&] { cudaIpcCloseMemHandle(mapped); });
    set(mapped, 6, stream);
    ok(cudaStreamSynchronize(stream));
    CHECK(memory.first() == 6, "mapped memory is other memory");
    in_process(0, [&] { breaks("ipc", "others have it open", [&] { cudaFree(memory); }); });
    // Killed before its device comes to the record.
    kill_process(0);
    ok(cudaStreamWaitEvent(stream, opened, 0));
    ok(cudaEventDestroy(opened));
    ok(cudaIpcCloseMemHandle(mapped));
  });
}

// To open memory enables peers, if it is asked to.
void check_mapped_peers() {
  Memory memory(1);
  cudaIpcMemHandle_t handle;
  ok(cudaIpcGetMemHandle(&handle, memory));
  in_process(1, [&] {
    Memory own;
    const cudaStream_t stream = stream_on(0);
    for (const unsigned flags : {0u, unsigned{cudaIpcMemLazyEnablePeerAccess}}) {
      void* mapped = nullptr;
      ok(cudaIpcOpenMemHandle(&mapped, handle, flags));
      const auto program = [&] { ok(launch_plain(stream, mapped, own)); };
      flags == 0 ? breaks("peer", "is no peer", program) : program();
      run_to_end();
      ok(cudaIpcCloseMemHandle(mapped));
    }
  });
}

void check_dead_process() {
  Event event(0, cudaEventDisableTiming | cudaEventInterprocess);
  cudaIpcEventHandle_t handle;
  ok(cudaIpcGetEventHandle(&handle, event.event));
  Memory memory;
  in_process(1, [&] {
    cudaEvent_t opened = nullptr;
    ok(cudaIpcOpenEventHandle(&opened, handle));
    in_process(0, [&] { ok(cudaEventRecord(event.event, nullptr)); });
    ok(cudaStreamWaitEvent(stream_on(0), opened, 0));
    kill_process(0);
    in_process(0, [&] { set(memory, 1, nullptr); });  // does nothing
    breaks("deadlock", "of a process that is dead", [] {});
    ok(cudaEventDestroy(opened));
  });
}

// -- words ----------------------------------------------------------------------------------------

void check_words() {
  Memory memory;
  Words words;
  words.first() = 0xfffffffeu;
  const cudaStream_t one = stream_on(0);
  const cudaStream_t two = stream_on(1);
  for (std::uint32_t n = 0xffffffffu; n != 3; ++n) {  // over the end of 32 bits
    set(memory, static_cast<int>(n), one);
    words.write(one, n);
    words.await(two, n);
    set(memory, 4, two);
    ok(cudaStreamSynchronize(two));
  }
  breaks("deadlock", "a wait for a word", [&] {  // of what comes after it
    words.await(two, 3);
    order(two, one, 1);
    words.write(one, 3);
  });
  breaks("race", "unordered", [&] {
    words.write(one, 8);
    set(memory, 5, one);  // after the write
    words.await(two, 8);
    set(memory, 6, two);
  });
  breaks("word", "barrier", [&] { words.write(one, 9, CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER); });
  breaks("word", ">=", [&] { words.await(one, 9, CU_STREAM_WAIT_VALUE_EQ); });
  // The host ends a wait: what comes after it is in no order, and no race.
  set(memory, 1, one);
  words.await(two, 20);
  set(memory, 2, two);
  __atomic_store_n(&words.first(), 20, __ATOMIC_RELEASE);
  run_to_end();
}

void check_unregistered() {
  std::vector<std::uint32_t> word(64);
  const cudaStream_t stream = stream_on(0);
  ok(cudaHostRegister(word.data(), kBytes, cudaHostRegisterMapped));
  const auto write = [&] {
    driver_call<CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned)>("cuStreamWriteValue32")(
        stream, reinterpret_cast<CUdeviceptr>(word.data()), 1, CU_STREAM_WRITE_VALUE_DEFAULT);
  };
  breaks("freed", "still used by a write of a word", [&] {
    write();
    cudaHostUnregister(word.data());
  });
  ok(cudaHostUnregister(word.data()));
  is(cudaHostUnregister(word.data()), cudaErrorHostMemoryNotRegistered);
  breaks("freed", "not allocated", write);
}

}  // namespace

const std::vector<Rule> kDeviceRules = {
    {"freed", &check_freed},
    {"free-host", &check_free_host},
    {"pageable", &check_pageable},
    {"peers", &check_peers},
    {"contexts", &check_contexts},
    {"sticky", &check_sticky},
    {"sticky-graphs", &check_sticky_graphs},
    {"processes", &check_processes, {.hosts_see_each_other = true}},
    {"mapped-peers", &check_mapped_peers, {.hosts_see_each_other = true}},
    {"dead-process", &check_dead_process},
    {"words", &check_words},
    {"unregistered", &check_unregistered}};

}  // namespace pyringar::model
