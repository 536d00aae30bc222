// capture_rules_test: rules of captures and graphs.

#include <functional>

#include "rules.h"

namespace pyringar::model {

namespace {

// A capture of one stream, and what comes of it.
class Captured {
 public:
  explicit Captured(cudaStream_t stream, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal)
      : stream_(stream) {
    ok(cudaStreamBeginCapture(stream, mode));
  }
  void ends_with(cudaError_t wanted) {
    cudaGraph_t graph = nullptr;
    is(cudaStreamEndCapture(stream_, &graph), wanted);
    if (graph != nullptr) ok(cudaGraphDestroy(graph));
  }
  void is_spoiled() { ends_with(cudaErrorStreamCaptureInvalidated); }

 private:
  const cudaStream_t stream_;
};

// A graph that can be launched; what `program` captures on the stream.
class Replay {
 public:
  template <typename Program>
  Replay(cudaStream_t stream, Program&& program) {
    cudaGraph_t graph = nullptr;
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    program();
    ok(cudaStreamEndCapture(stream, &graph));
    ok(cudaGraphInstantiate(&exec, graph, 0));
    ok(cudaGraphDestroy(graph));
  }
  ~Replay() { cudaGraphExecDestroy(exec); }
  void launch(cudaStream_t stream) const { ok(cudaGraphLaunch(exec, stream)); }
  cudaGraphExec_t exec = nullptr;
};

// What a thread may not call while another one captures, unless it says that it knows.
void check_unsafe_calls() {
  const cudaStream_t stream = stream_on(0);
  const cudaStream_t other = stream_on(0);
  Event event;
  Memory memory;
  void* pinned = nullptr;
  ok(cudaHostAlloc(&pinned, 1, 0));
  std::vector<char> pageable(kBytes);
  void* made = nullptr;
  const std::function<cudaError_t()> calls[] = {
      [&] { return cudaMalloc(&made, 1); },
      [&] { return cudaHostAlloc(&made, 1, 0); },
      [&] { return cudaFree(memory); },
      [&] { return cudaFreeHost(pinned); },
      [&] { return cudaHostRegister(pageable.data(), kBytes, 0); },
      [&] { return cudaHostUnregister(pageable.data()); },
      [&] { return load(plain_kernel()); },
      [&] { return cudaEventQuery(event.event); },
      [&] { return cudaEventSynchronize(event.event); },
      [&] { return cudaStreamSynchronize(other); },
      [&] { return cudaSetDevice(1), cudaDeviceSynchronize(); },
      [&] { return cudaIpcOpenMemHandle(&made, {}, 0); },
      [&] { return cudaIpcCloseMemHandle(made); }};
  for (const auto& call : calls) {
    Captured captured(stream);
    on_thread([&] { is(call(), cudaErrorStreamCaptureUnsupported); });
    captured.is_spoiled();
  }
  {
    Captured captured(stream);
    on_thread([] {
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
      ok(cudaThreadExchangeStreamCaptureMode(&mode));
      Memory();
    });
    captured.ends_with(cudaSuccess);
  }
  Captured captured(stream, cudaStreamCaptureModeThreadLocal);
  on_thread([] { Memory(); });
  is(cudaMalloc(&made, 1), cudaErrorStreamCaptureUnsupported);
  captured.is_spoiled();
  ok(cudaFreeHost(pinned));
}

void check_captures() {
  const cudaStream_t stream = stream_on(0);
  for (const bool is_device : {false, true}) {  // what is captured is not asked, whatever the mode
    Captured captured(stream, cudaStreamCaptureModeRelaxed);
    is(is_device ? cudaDeviceSynchronize() : cudaStreamSynchronize(stream),
       cudaErrorStreamCaptureUnsupported);
    captured.is_spoiled();
  }
  {
    Captured captured(stream);
    Event event;
    ok(cudaEventRecord(event.event, stream));
    is(cudaEventQuery(event.event), cudaErrorCapturedEvent);
    captured.is_spoiled();
    is(cudaStreamWaitEvent(stream_on(0), event.event, 0), cudaErrorCapturedEvent);
  }
  Memory memory;
  const cudaStream_t blocking = stream_on(0, cudaStreamDefault);
  Captured captured(blocking);
  is(cudaMemsetAsync(memory, 1, kBytes, nullptr), cudaErrorStreamCaptureImplicit);
  captured.is_spoiled();
  is(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
     cudaErrorStreamCaptureUnsupported);
}

void check_isolation() {
  const cudaStream_t stream = stream_on(0);
  const cudaStream_t other = stream_on(0);
  {
    Event event;
    ok(cudaEventRecord(event.event, other));
    Captured captured(stream);
    is(cudaStreamWaitEvent(stream, event.event, 0), cudaErrorStreamCaptureIsolation);
    captured.is_spoiled();
  }
  Event event;
  {
    Captured captured(stream);
    ok(cudaEventRecord(event.event, stream));
    is(cudaStreamWaitEvent(nullptr, event.event, 0), cudaErrorStreamCaptureImplicit);
    captured.is_spoiled();
  }
  Captured one(stream);
  Captured two(other);
  ok(cudaEventRecord(event.event, stream));
  is(cudaStreamWaitEvent(other, event.event, 0), cudaErrorStreamCaptureMerge);
  two.is_spoiled();
  one.ends_with(cudaSuccess);
}

void check_joined() {
  const cudaStream_t stream = stream_on(0);
  const cudaStream_t other = stream_on(0);
  Memory memory;
  {
    Captured captured(stream);
    order(stream, other);
    set(memory, 1, other);
    captured.ends_with(cudaErrorStreamCaptureUnjoined);
  }
  {
    Captured captured(stream);
    order(stream, other);
    cudaGraph_t graph = nullptr;
    is(cudaStreamEndCapture(other, &graph), cudaErrorStreamCaptureUnmatched);
    order(other, stream);
    captured.ends_with(cudaSuccess);
  }
  Captured captured(stream);
  on_thread([&] { captured.ends_with(cudaErrorStreamCaptureWrongThread); });
}

void check_replays() {
  const cudaStream_t stream = stream_on(0);
  const cudaStream_t other = stream_on(0);
  Memory first;
  Memory second;
  std::vector<char> tensor(kBytes);
  show_tensor(tensor.data(), kBytes, 0);
  const Replay replay(stream, [&] {
    set(first, 7, stream);
    order(stream, other);
    ok(launch_plain(other, first, second));
    order(other, stream);
    set(tensor.data(), 9, stream);
  });
  for (int i = 0; i < 2; ++i) {
    CHECK(second.first() != 7, "it ran while it was captured");
    set(first, i, stream);
    replay.launch(stream);
    ok(cudaStreamSynchronize(stream));
    CHECK(second.first() == 7 && tensor[0] == 9, "not replayed");
    set(second, 0, stream);
    run_to_end();
  }
  breaks("race", "unordered", [&] {
    replay.launch(stream);
    set(second, 1, other);
  });
  const Replay parallel(stream, [&] {
    order(stream, other);
    set(first, 1, stream);
    set(first, 2, other);
    order(other, stream);
  });
  breaks("race", "unordered", [&] { parallel.launch(stream); });
  ok(cudaDeviceSynchronize());
  hide_tensor(tensor.data());
  breaks("freed", "not allocated", [&] { replay.launch(stream); });
}

// A launch that is captured loads nothing yet.
void check_loading() {
  Waiting waiting;
  Memory from;
  Memory to;
  const cudaStream_t stream = stream_on(0);
  waiting.run(stream_on(0));
  const Replay replay(stream, [&] { ok(launch_plain(stream, from, to)); });
  breaks("deadlock", "loading a kernel", [&] { replay.launch(stream); });
}

void keep(cudaStream_t stream, void* value, cudaHostFn_t destroy) {
  cudaUserObject_t object = nullptr;
  cudaStreamCaptureStatus status{};
  cudaGraph_t graph = nullptr;
  ok(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, nullptr, nullptr, nullptr));
  ok(cudaUserObjectCreate(&object, value, destroy, 1, cudaUserObjectNoDestructorSync));
  ok(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));
}

void check_user_objects() {
  const cudaStream_t stream = stream_on(0);
  bool is_destroyed = false;
  const auto note = [](void* flag) { *static_cast<bool*>(flag) = true; };
  {
    const Replay replay(stream, [&] { keep(stream, &is_destroyed, note); });
    replay.launch(stream);
    run_to_end();
    CHECK(!is_destroyed, "what a graph keeps is gone before it");
  }
  CHECK(is_destroyed, "what a graph kept is left");
  is_destroyed = false;
  cudaUserObject_t object = nullptr;
  ok(cudaUserObjectCreate(&object, &is_destroyed, note, 1, cudaUserObjectNoDestructorSync));
  ok(cudaUserObjectRelease(object, 1));
  CHECK(is_destroyed, "what nobody keeps is left");
  breaks("replay", "destructor calls CUDA", [&] {
    const Replay replay(stream, [&] { keep(stream, nullptr, [](void*) { cudaGetLastError(); }); });
  });
}

}  // namespace

const std::vector<Rule> kCaptureRules = {
    {"unsafe-calls", &check_unsafe_calls}, {"captures", &check_captures},
    {"isolation", &check_isolation},       {"joined", &check_joined},
    {"replays", &check_replays},           {"captured-loading", &check_loading},
    {"user-objects", &check_user_objects}};

}  // namespace pyringar::model
