// capture: stream captures and graphs of the modelled runtime.
//
// Contract  the rules "capture", "isolation", "joined" and "replay" of runtime_model.h.
#include <algorithm>

#include "machine.h"

namespace pyringar::model {

// Run the planned action of another thread before this runtime call.
RuntimeCall::Between::Between() { host().in_between.run_if_due(); }

cudaError_t Machine::add_node(StreamState* stream, StreamWork work) {
  Capture& capture = *stream->capture;
  if (capture.is_invalid) return cudaErrorStreamCaptureInvalidated;
  capture.graph->nodes.push_back({std::move(work), stream->nodes});
  stream->nodes = {capture.graph->nodes.size() - 1};
  return cudaSuccess;
}

cudaError_t Machine::invalidate(Capture& capture, cudaError_t error) const {
  capture.is_invalid = true;
  return error;
}

// Rules of the Runtime API's cudaThreadExchangeStreamCaptureMode.
cudaError_t Machine::check_unsafe_call() {
  const Host& own = host();
  if (own.mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (const auto& capture : captures) {
    const bool is_own = capture->host == own.id && capture->mode != cudaStreamCaptureModeRelaxed;
    const bool is_global =
        own.mode == cudaStreamCaptureModeGlobal && capture->mode == cudaStreamCaptureModeGlobal;
    if (is_own || is_global) return invalidate(*capture, cudaErrorStreamCaptureUnsupported);
  }
  return cudaSuccess;
}

namespace {

std::shared_ptr<Graph>& graph_of(cudaGraph_t graph) {
  return *reinterpret_cast<std::shared_ptr<Graph>*>(graph);
}

std::set<std::size_t> ancestors(const Graph& graph, const std::set<std::size_t>& nodes) {
  std::set<std::size_t> found = nodes;
  for (std::size_t i = graph.nodes.size(); i-- > 0;) {
    if (found.count(i) > 0) found.insert(graph.nodes[i].after.begin(), graph.nodes[i].after.end());
  }
  return found;
}

cudaError_t end_capture(Capture& capture, StreamState* stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (stream != capture.origin) return cudaErrorStreamCaptureUnmatched;
  const bool is_wrong_thread =
      capture.mode != cudaStreamCaptureModeRelaxed && capture.host != host().id;
  const std::set<std::size_t> joined = ancestors(*capture.graph, stream->nodes);
  const bool is_joined = joined.size() == capture.graph->nodes.size();
  for (StreamState* other : capture.streams) {
    other->capture = nullptr;
    other->nodes.clear();
  }
  capture.is_over = true;
  if (is_wrong_thread) return cudaErrorStreamCaptureWrongThread;
  if (capture.is_invalid) return cudaErrorStreamCaptureInvalidated;
  if (!is_joined) return cudaErrorStreamCaptureUnjoined;
  *graph = reinterpret_cast<cudaGraph_t>(new std::shared_ptr<Graph>(capture.graph));
  return cudaSuccess;
}

}  // namespace

}  // namespace pyringar::model

using namespace pyringar::model;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  Machine& machine = call.machine();
  if (stream == nullptr) return error(cudaErrorStreamCaptureUnsupported);
  StreamState* state = machine.state_of(stream);
  if (state->capture != nullptr) return error(cudaErrorIllegalState);
  const auto capture = std::make_shared<Capture>(
      Capture{machine.next_id++, mode, host().id, state, std::make_shared<Graph>(), {state}});
  state->capture = capture;
  machine.captures.insert(capture);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return *graph = nullptr, call.fault();
  StreamState* state = call.machine().state_of(stream);
  const auto capture = state->capture;
  if (capture == nullptr) return error(cudaErrorIllegalState);
  const cudaError_t status = end_capture(*capture, state, graph);
  if (capture->is_over) call.machine().captures.erase(capture);
  return error(status);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     std::size_t*) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  const StreamState& state = *call.machine().state_of(stream);
  const auto& capture = state.capture;
  *status = capture == nullptr    ? cudaStreamCaptureStatusNone
            : capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                  : cudaStreamCaptureStatusActive;
  // Runtime API: "all optional outputs ... are set only if the status is active".
  if (capture == nullptr || capture->is_invalid) return cudaSuccess;
  if (id != nullptr) *id = capture->id;
  if (graph != nullptr) *graph = reinterpret_cast<cudaGraph_t>(&capture->graph);
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, host().mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  *exec = reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<Graph>(graph_of(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  RuntimeCall call;
  if (call.fault() != cudaSuccess) return call.fault();
  StreamWork work{StreamWork::Kind::kGraph, "a graph"};
  work.graph = *reinterpret_cast<std::shared_ptr<Graph>*>(exec);
  for (const Node& node : work.graph->nodes) {
    const StreamWork& captured = node.work;
    if (captured.kernel != nullptr) {
      call.machine().load(call.lock(), captured.kernel, captured.device);
    }
  }
  return error(call.machine().enqueue(call.machine().state_of(stream), std::move(work)));
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  RuntimeCall call;
  delete &graph_of(graph);
  return call.fault();
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  return cudaGraphDestroy(reinterpret_cast<cudaGraph_t>(exec));
}

}  // extern "C"
