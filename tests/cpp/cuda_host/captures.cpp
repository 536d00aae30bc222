// captures: CUDA graphs of calls, calls that cannot be captured, and calls outside of captures.
#include <deque>

#include "cuda/background.h"
#include "group_cases.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

class CapturedGraph {
 public:
  template <typename Program>
  CapturedGraph(const cuda::DeviceGroup& group, const Streams& streams, Program&& program) {
    const int first = group.devices()[0];
    ok(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
    for (std::size_t d = 1; d < streams.size(); ++d) {
      order(streams[0], first, streams[d], group.devices()[d]);
    }
    program();
    for (std::size_t d = 1; d < streams.size(); ++d) {
      order(streams[d], group.devices()[d], streams[0], first);
    }
    cudaGraph_t graph = nullptr;
    ok(cudaStreamEndCapture(streams[0], &graph), "cudaStreamEndCapture");
    ok(cudaGraphInstantiate(&exec_, graph, 0), "cudaGraphInstantiate");
    ok(cudaGraphDestroy(graph), "cudaGraphDestroy");
  }
  ~CapturedGraph() { cudaGraphExecDestroy(exec_); }

  // Replay after all work now on the streams, and before later work.
  void replay(const cuda::DeviceGroup& group, const Streams& streams) const {
    const int first = group.devices()[0];
    for (std::size_t d = 1; d < streams.size(); ++d) {
      order(streams[d], group.devices()[d], streams[0], first);
    }
    ok(cudaGraphLaunch(exec_, streams[0]), "cudaGraphLaunch");
    for (std::size_t d = 1; d < streams.size(); ++d) {
      order(streams[0], first, streams[d], group.devices()[d]);
    }
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// Replay graphs twice beside eager calls of the same group, and once after close().
void check_graphs(Random& random) {
  start(random);
  const std::vector<Ranks> all = {{0, 0}, {0, 0, 0}, {0, 1}, {2, 0, 1}, {0, 1, 0, 1}};
  const Ranks ranks = all[random.below(all.size())];
  cuda::DeviceGroup group(ranks, kLong);
  const Streams streams = make_capturable(group);
  std::deque<GroupCase> captured;
  for (int i = random.between(1, 3); i > 0; --i) {
    captured.emplace_back(random, ranks, Algorithm::kDirect, 4);
  }
  std::deque<GroupCase> eager;
  const CapturedGraph graph(group, streams, [&] {
    for (const GroupCase& call : captured) group.run(call.collective(), streams);
  });
  for (int replay = 0; replay < 3; ++replay) {
    const bool is_closed = replay == 2;
    if (is_closed) group.close();
    for (GroupCase& call : captured) call.fill(group, streams);
    graph.replay(group, streams);
    if (!is_closed) {
      const Streams others = make_streams(random, group);
      const auto algorithm = random.one_in(2) ? Algorithm::kRing : Algorithm::kDirect;
      eager.emplace_back(random, ranks, algorithm, 4).call(group, others);
    }
    for (GroupCase& call : captured) call.read(group, streams);
    model::run_to_end();
    model::meet_hosts();
    for (const GroupCase& call : captured) call.check();
    for (const GroupCase& call : eager) call.check();
  }
}

// Calls that cannot be captured raise and leave the capture intact, asynchronous calls too.
void check_not_capturable(Random& random) {
  start(random);
  const bool is_mixed = random.one_in(3);
  const bool is_ring = !is_mixed && random.one_in(2);
  const Ranks ranks = is_mixed                      ? Ranks{0, -1}
                      : is_ring && random.one_in(2) ? Ranks{0, 0}
                                                    : Ranks{0, 1};
  if (!is_mixed && !is_ring)
    peers = random.one_in(2) ? model::Peers{false, true} : model::Peers{true, false};
  const auto group = std::make_shared<cuda::DeviceGroup>(ranks, kLong);
  cuda::Background background(group);
  GroupCase call(random, ranks, is_ring ? Algorithm::kRing : Algorithm::kDirect, 3, true);
  const Streams streams = make_capturable(*group);
  call.fill(*group, streams);
  const CapturedGraph graph(*group, streams, [&] {
    check_throws(ErrorKind::kUnsupported, "cannot be captured",
                 [&] { group->run(call.collective(), streams); });
    check_throws(ErrorKind::kUnsupported, "cannot be captured",
                 [&] { background.submit(call.collective(), streams); });
  });
  group->run(call.collective(), streams);  // works: the refused call had no effect
  call.read(*group, streams);
  model::run_to_end();
  call.check();
}

// If only some streams are captured, the call is refused and nothing is enqueued.
void check_half_captured(Random& random) {
  start(random);
  cuda::DeviceGroup group({0, 1, 2}, kLong);
  GroupCase call(random, {0, 1, 2}, random.one_in(2) ? Algorithm::kDirect : Algorithm::kRing, 3);
  const Streams streams = make_capturable(group);
  call.fill(group, streams);
  const std::size_t odd = random.below(3);
  ok(cudaStreamBeginCapture(streams[odd], cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  check_throws(ErrorKind::kUnsupported,
               "captures the stream of cuda:", [&] { group.run(call.collective(), streams); });
  cudaGraph_t graph = nullptr;
  ok(cudaStreamEndCapture(streams[odd], &graph), "cudaStreamEndCapture");
  ok(cudaGraphDestroy(graph), "cudaGraphDestroy");
  group.run(call.collective(), streams);  // works: the refused call had no effect
  call.read(group, streams);
  model::run_to_end();
  call.check();
}

// A call on a stream with an invalidated capture is refused.
void check_broken_capture(Random& random) {
  start(random);
  const Ranks ranks = random.one_in(2) ? Ranks{0, 0} : Ranks{0, 1};
  const auto group = std::make_shared<cuda::DeviceGroup>(ranks, kLong);
  cuda::Background background(group);
  GroupCase call(random, ranks, Algorithm::kDirect, 3);
  const Streams streams = make_capturable(*group);
  call.fill(*group, streams);
  ok(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
  for (std::size_t d = 1; d < streams.size(); ++d) {
    order(streams[0], group->devices()[0], streams[d], group->devices()[d]);
  }
  CHECK(cudaStreamSynchronize(streams[0]) != cudaSuccess, "synchronized a captured stream");
  check_throws(ErrorKind::kUnsupported, "was invalidated",
               [&] { group->run(call.collective(), streams); });
  check_throws(ErrorKind::kUnsupported, "was invalidated",
               [&] { background.submit(call.collective(), streams); });
  cudaGraph_t graph = nullptr;
  CHECK(cudaStreamEndCapture(streams[0], &graph) != cudaSuccess, "a broken capture gave a graph");
  cudaGetLastError();
  group->run(call.collective(), streams);  // works: the refused call had no effect
  call.read(*group, streams);
  model::run_to_end();
  call.check();
}

// Asynchronous calls join the capture. Calls outside of the capture raise and leave it intact.
void check_captured_background(Random& random) {
  start(random);
  const Ranks ranks = random.one_in(2) ? Ranks{0, 0} : Ranks{0, 1};
  const auto group = std::make_shared<cuda::DeviceGroup>(ranks, kLong);
  cuda::Background background(group);
  GroupCase captured(random, ranks, Algorithm::kDirect, 3);
  GroupCase eager(random, ranks, Algorithm::kDirect, 3);
  const Streams streams = make_capturable(*group);
  const Streams others = make_capturable(*group);
  const auto submit = [&](GroupCase& call, const Streams& current) {
    const auto done = background.submit(call.collective(), current);
    done->make_wait(current);
    return done;
  };
  eager.fill(*group, others);
  {
    const CapturedGraph graph(*group, streams, [&] {
      const auto done = submit(captured, streams);
      CHECK(done->capture() != 0, "the call is not captured");
      check_throws(ErrorKind::kUnsupported, "captures calls in the background",
                   [&] { submit(eager, others); });
      if (ranks[1] == 0) return;
      check_throws(ErrorKind::kUnsupported, "captures the stream of cuda:0",
                   [&] { submit(eager, {streams[0], others[1]}); });
    });
    captured.fill(*group, streams);
    graph.replay(*group, streams);
    captured.read(*group, streams);
    submit(eager, others);
    eager.read(*group, others);
    background.wait_for();
    model::run_to_end();
  }
  captured.check();
  eager.check();
}

// Event queries, and groups that are made, used and closed, do not disturb a capture.
void check_beside_capture(Random& random) {
  start(random);
  cuda::DeviceGroup group({0, 0}, kLong);
  GroupCase call(random, {0, 0}, Algorithm::kRing, 3);
  const Streams streams = make_capturable(group);
  call.fill(group, streams);
  group.run(call.collective(), streams);
  const cuda::Event done(0);
  done.record(streams[0]);
  const cudaStream_t captured = make_stream(0);
  ok(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  {
    std::thread([&] {
      while (!done.is_done()) continue;
      cuda::DeviceGroup other({0, 0}, kLong);
      GroupCase own(random, {0, 0}, Algorithm::kRing, 2);
      const Streams others = make_capturable(other);
      own.fill(other, others);
      other.run(own.collective(), others);
      other.close();
      group.close();
    }).join();
  }
  cudaGraph_t graph = nullptr;
  ok(cudaStreamEndCapture(captured, &graph), "the capture was invalidated");
  ok(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

const Part kGraphs("graphs", &check_graphs);
const Part kNotCapturable("not-capturable", &check_not_capturable, 2);
const Part kHalfCaptured("half-captured", &check_half_captured, 4);
const Part kBrokenCapture("broken-capture", &check_broken_capture, 4);
const Part kCapturedBackground("captured-background", &check_captured_background, 2);
const Part kBesideCapture("beside-capture", &check_beside_capture, 4);

}  // namespace

}  // namespace pyringar::stress
