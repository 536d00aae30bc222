// device_group_test: cuda/device_group on the modelled runtime, with the kernels' own source: bits,
// stream order, errors, leaks.
#include <algorithm>
#include <cstdlib>

#include "cuda/background.h"
#include "group_cases.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

Ranks random_ranks(Random& random) {
  const std::vector<Ranks> all = {
      {0, 0},     {0, 0, 0, 0, 0}, {0, 1},  {0, 0, 1, 1}, {2, 0, 1},   {0, 1, 0, 1},
      {-1, 0, 0}, {0, -1, 1, 0},   {1, -1}, {3},          {3, 1, 2, 0}};
  return all[random.below(all.size())];
}

Algorithm random_algorithm(Random& random, const cuda::DeviceGroup& group, const Ranks& ranks) {
  const bool one_memory = group.devices().size() == 1 && !group.has_host_ranks();
  if (!group.has_host_ranks() && ranks.size() > 1 && random.one_in(2)) return Algorithm::kRing;
  return one_memory && random.one_in(2) ? Algorithm::kFused : Algorithm::kDirect;
}

// Results have the right bits if only the group's calls order the streams.
void check_bits(Random& random) {
  start(random);
  const Ranks ranks = random_ranks(random);
  peers = {!random.one_in(3), !random.one_in(3)};
  std::deque<GroupCase> calls;
  cuda::DeviceGroup group(ranks, kLong);
  for (int i = 0; i < 4; ++i) {
    const Streams streams = make_streams(random, group);
    GroupCase& call = calls.emplace_back(random, ranks, random_algorithm(random, group, ranks), 12);
    call.call(group, streams);
  }
  if (random.one_in(2)) group.close();
  model::run_to_end();
  if (random.one_in(2)) group.close();
  for (const GroupCase& call : calls) call.check();
}

// Staging buffers in host memory grow while an earlier call still uses them.
void check_growth(Random& random) {
  start(random);
  const Ranks ranks = {0, 1};
  peers = {false, true};
  cuda::DeviceGroup group(ranks, kLong);
  GroupCase small(random, ranks, Algorithm::kDirect, 1);
  GroupCase large(random, ranks, Algorithm::kDirect, 1, true);
  for (GroupCase* call : {&small, &large}) {
    const Streams streams = make_streams(random, group);
    call->call(group, streams);
  }
  model::run_to_end();
  small.check();
  large.check();
}

void check_closed(Random& random) {
  start(random);
  cuda::DeviceGroup group({0, 1}, kLong);
  group.close();
  group.close();
  GroupCase call(random, {0, 1}, Algorithm::kDirect, 3);
  check_throws(ErrorKind::kState, "closed",
               [&] { group.run(call.collective(), make_streams(random, group)); });
}

// -- asynchronous calls and gradients -------------------------------------------------------------

// Asynchronous calls run on streams other than the callers' streams.
void check_background(Random& random) {
  start(random);
  const Ranks ranks = random_ranks(random);
  peers = {!random.one_in(3), !random.one_in(3)};
  const auto group = std::make_shared<cuda::DeviceGroup>(ranks, kLong);
  cuda::Background background(group);
  std::deque<GroupCase> cases;
  for (int i = 0; i < 3; ++i) {
    const Streams streams = make_streams(random, *group);
    GroupCase& one = cases.emplace_back(random, ranks, random_algorithm(random, *group, ranks), 6);
    one.fill(*group, streams);
    const auto done = background.submit(one.collective(), streams);
    if (random.one_in(2)) {
      while (!done->is_done()) continue;
    }
    const Streams others = make_streams(random, *group);
    done->make_wait(others);
    one.read(*group, others);
  }
  if (random.one_in(2)) {  // like close() of a communicator, after which tensors may be freed
    GroupCase& last = cases.emplace_back(random, ranks, Algorithm::kDirect, 6);
    const Streams streams = make_streams(random, *group);
    last.fill(*group, streams);
    const auto done = background.submit(last.collective(), streams);
    background.wait_for();
    CHECK(done->is_done(), "wait_for() returned before the call ended");
    last.read(*group, streams);
  }
  model::run_to_end();
  for (const GroupCase& one : cases) one.check();
}

// A bucket waits for gradients on private streams, while backward continues there.
void check_gradients(Random& random) {
  start(random);
  const Ranks ranks = random.one_in(2) ? Ranks{0, 0} : Ranks{1, 0, 1};
  const auto group = std::make_shared<cuda::DeviceGroup>(ranks, kLong);
  cuda::Background background(group);
  cuda::ReadyEvents ready(ranks, {1, 3});
  std::deque<GroupCase> cases;
  for (int step = 0; step < 2; ++step) {
    ready.start_step();
    for (int bucket = 0; bucket < 2; ++bucket) {
      const int size = bucket == 0 ? 1 : 3;
      std::vector<GroupCase*> gradients;
      for (int i = 0; i < size; ++i) {
        gradients.push_back(&cases.emplace_back(random, ranks, Algorithm::kDirect, 1));
      }
      for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        const Streams own = {make_stream(ranks[rank]), make_stream(ranks[rank])};
        for (GroupCase* gradient : gradients) {
          const cudaStream_t stream = own[random.below(2)];
          gradient->fill_rank(rank, stream);
          ready.note(bucket, static_cast<int>(rank), true, stream);
          if (random.one_in(4)) {
            gradient->fill_rank(rank, stream);
            ready.note(bucket, static_cast<int>(rank), false, stream);
          }
        }
      }
      const Streams defaults(group->devices().size());
      for (GroupCase* gradient : gradients) {
        const auto done =
            background.submit(gradient->collective(), defaults, cuda::BucketReady{&ready, bucket});
        done->make_wait(defaults);
        gradient->read(*group, defaults);
      }
    }
    model::run_to_end();
    model::meet_hosts();
    for (const GroupCase& one : cases) one.check();
  }
}

// -- deadlocks, timeouts and failures -------------------------------------------------------------

// Another thread frees memory between any two runtime calls of a group's call.
void check_frees(Random& random) {
  start(random);
  cuda::DeviceGroup group({0, 1}, kLong);
  GroupCase call(random, {0, 1}, Algorithm::kDirect, 3);
  const Streams streams = make_capturable(group);
  call.fill(group, streams);
  void* memory = nullptr;
  ok(cudaMalloc(&memory, 100), "cudaMalloc");
  const auto free = [&] { ok(cudaFree(std::exchange(memory, nullptr)), "cudaFree"); };
  model::in_between(random.between(0, 40), free);
  group.run(call.collective(), streams);
  model::in_between(0, nullptr);
  free();
  call.read(group, streams);
  group.close();
  model::run_to_end();
  call.check();
}

// Another thread allocates, frees or orders streams between the launches of a ring.
void check_between_launches(Random& random) {
  start(random);
  cuda::DeviceGroup group({0, 1}, kLong);
  GroupCase call(random, {0, 1}, Algorithm::kRing, 3);
  const Streams streams = make_capturable(group);
  call.fill(group, streams);
  peers.tensors_are_visible = false;
  cuda::DeviceGroup staged({0, 1}, kLong);
  GroupCase own(random, {0, 1}, Algorithm::kDirect, 3);
  const Streams others = make_capturable(staged);
  own.fill(staged, others);
  const cudaStream_t side = make_stream(1);
  std::thread other;
  const int what = random.between(0, 3);
  if (what == 3) staged.run(own.collective(), others);  // so that close() frees staging memory
  model::before_launch(random.between(0, 3), [&] {
    if (what == 0) other = std::thread([] { cuda::DeviceGroup({0, 1}, kLong).close(); });
    if (what == 1) other = std::thread([&] { staged.run(own.collective(), others); });
    if (what == 2) order(streams[0], 0, side, 1);  // a kernel load would wait for `side`
    if (what == 3) other = std::thread([&] { staged.close(); });
  });
  group.run(call.collective(), streams);
  model::before_launch(0, nullptr);
  if (other.joinable()) other.join();
  call.read(group, streams);
  group.close();
  model::run_to_end();
  call.check();
}

void check_launch_blocking(Random& random) {
  model::Options options;
  options.launch_blocking = true;
  start(random, options);
  setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  cuda::DeviceGroup group({0, 1}, kLong);
  GroupCase direct(random, {0, 1}, Algorithm::kDirect, 3);
  const Streams streams = make_streams(random, group);
  direct.call(group, streams);
  GroupCase ring(random, {0, 1}, Algorithm::kRing, 3);
  check_throws(ErrorKind::kUnsupported, "CUDA_LAUNCH_BLOCKING",
               [&] { group.run(ring.collective(), streams); });
  unsetenv("CUDA_LAUNCH_BLOCKING");
  model::run_to_end();
  direct.check();
}

// A device that waits for a late device still runs other streams, which the late device needs.
void check_late_device(Random& random) {
  start(random);
  cuda::DeviceGroup group({0, 1}, kLong);
  GroupCase call(random, {0, 1}, Algorithm::kDirect, 1, true);
  GroupCase own(random, {0}, Algorithm::kFused, 1, true);
  const Streams streams = make_capturable(group);
  const cudaStream_t side = make_stream(0);
  group.run(call.collective(), streams);  // loads the kernels
  call.fill(group, streams);
  const cuda::Event event(0);
  cuda::DeviceGroup alone({0}, kLong);
  alone.run(own.collective(), Streams{side});
  model::run_to_end();
  own.fill(alone, {side});
  alone.run(own.collective(), Streams{side});
  event.record(side);
  event.make_wait(streams[1], 1);
  group.run(call.collective(), streams);
  call.read(group, streams);
  own.read(alone, {side});
  model::run_to_end();
  call.check();
}

// If the last call of a program fails, close() raises once.
void check_withheld(Random& random) {
  model::Options options;
  options.lets_time_pass = true;
  start(random, options);
  const Ranks ranks = random.one_in(2) ? Ranks{0, 1, 0, 1} : Ranks{0, 0, 0};
  cuda::DeviceGroup group(ranks, std::chrono::milliseconds(100));
  group.withhold_rank(1);
  GroupCase call(random, ranks, Algorithm::kRing, 1);
  if (call.collective().tensors[0].numel == 0) return;
  const Streams streams = make_capturable(group);
  group.run(call.collective(), streams);
  const std::string culprit = join("for rank 1 (cuda:", ranks[1], ")");
  if (random.one_in(2)) {
    model::run_to_end();
    check_throws(ErrorKind::kTimeout, culprit, [&] { group.check_usable(); });
    check_throws(ErrorKind::kTimeout, "failed before", [&] { group.check_usable(); });
    group.close();
  } else {
    check_throws(ErrorKind::kTimeout, culprit, [&] { group.close(); });
    group.close();
  }
}

// If a launch in the middle of a call fails, later calls are still ordered after the enqueued work.
void check_refused_launch(Random& random) {
  start(random);
  const std::vector<Ranks> all = {{0, 0}, {0, 1}, {0, -1}};
  const Ranks ranks = all[random.below(all.size())];
  const bool is_ring = ranks[1] == 0;
  peers = {false, false};
  cuda::DeviceGroup group(ranks, kLong);
  const auto algorithm = is_ring ? Algorithm::kRing : Algorithm::kDirect;
  GroupCase refused(random, ranks, algorithm, 6);
  GroupCase next(random, ranks, algorithm, 6);
  const Streams streams = make_capturable(group);
  const Streams others = make_capturable(group);
  refused.fill(group, streams);
  next.fill(group, others);
  model::refuse_launch(0, random.between(0, 3));
  try {
    group.run(refused.collective(), streams);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kCuda, error.what());
  }
  model::refuse_launch(0, -1);
  group.run(next.collective(), others);
  next.read(group, others);
  group.close();
  model::run_to_end();
  next.check();
}

// If a background launch fails on one device, no stream uses the tensors after the error.
void check_refused_background(Random& random) {
  start(random);
  const Ranks ranks = {0, 1};
  const auto group = std::make_shared<cuda::DeviceGroup>(ranks, kLong);
  cuda::Background background(group);
  GroupCase call(random, ranks, Algorithm::kDirect, 6);
  const Streams streams = make_capturable(*group);
  call.fill(*group, streams);
  model::refuse_launch(0, random.between(0, 3));
  try {
    background.submit(call.collective(), streams)->make_wait(streams);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kCuda, error.what());
    call.fill(*group, make_capturable(*group));
  }
  model::refuse_launch(0, -1);
  model::run_to_end();
}

// abort() ends a ring that waits for a missing rank, also while close() waits.
void check_abort(Random& random) {
  start(random);
  const Ranks ranks = random.one_in(2) ? Ranks{0, 1, 0, 1} : Ranks{0, 0, 0};
  cuda::DeviceGroup group(ranks, kLong);
  group.withhold_rank(1);
  GroupCase call(random, ranks, Algorithm::kRing, 1);
  const Streams streams = make_capturable(group);
  group.run(call.collective(), streams);
  if (random.one_in(2)) {
    model::in_between(0, [&] {
      model::meet_hosts();  // synchronize hosts, as the group's lock does
      group.abort();
    });
    group.close();
    model::in_between(0, nullptr);
  } else {
    group.abort();
    check_throws(ErrorKind::kState, "was aborted", [&] { group.check_usable(); });
    group.close();
  }
  model::run_to_end();
}

// -- devices --------------------------------------------------------------------------------------

// Only cuda:1 and cuda:3 get contexts, and the caller's current device is restored.
void check_contexts(Random& random) {
  start(random);
  const int before = random.one_in(2) ? 3 : 0;
  const auto program = [&] {
    if (before == 3) ok(cudaSetDevice(before), "cudaSetDevice");
    const auto check_current = [&] {
      int current = -1;
      ok(cudaGetDevice(&current), "cudaGetDevice");
      CHECK(current == before, "the current device is ", current, ", not ", before);
    };
    cuda::DeviceGroup group({3, 1}, kLong);
    const auto algorithm = random.one_in(2) ? Algorithm::kDirect : Algorithm::kRing;
    GroupCase call(random, {3, 1}, algorithm, 2);
    const Streams streams = make_capturable(group);
    call.fill(group, streams);
    group.run(call.collective(), streams);
    const cuda::Event done(3);
    done.record(streams[0]);
    done.make_wait(streams[1], 1);
    check_current();
    call.read(group, streams);
    group.close();
    model::run_to_end();
    call.check();
    check_current();
  };
  if (random.one_in(2)) {
    program();
  } else {
    std::thread(program).join();
  }
  CHECK((model::contexts() == std::set<int>{1, 3}), "contexts on ", model::contexts().size(),
        " devices");
}

void check_sticky(Random& random) {
  start(random);
  cuda::DeviceGroup group({0, 0}, kLong);
  GroupCase call(random, {0, 0}, Algorithm::kDirect, 2);
  const Streams streams = make_capturable(group);
  model::fault(0, cudaErrorIllegalAddress);
  check_throws(ErrorKind::kCuda, "until the process is restarted",
               [&] { group.run(call.collective(), streams); });
  group.close();
}

const Part kBits("bits", &check_bits);
const Part kGrowth("growth", &check_growth, 4);
const Part kBackground("background", &check_background, 2);
const Part kGradients("gradients", &check_gradients, 2);
const Part kFrees("frees", &check_frees);
const Part kBetweenLaunches("between-launches", &check_between_launches);
const Part kLaunchBlocking("launch-blocking", &check_launch_blocking, 8);
const Part kLateDevice("late-device", &check_late_device, 4);
const Part kWithheld("withheld", &check_withheld, 2);
const Part kRefusedLaunch("refused-launch", &check_refused_launch);
const Part kRefusedBackground("refused-background", &check_refused_background);
const Part kAbort("abort", &check_abort, 2);
const Part kContexts("contexts", &check_contexts, 2);
const Part kSticky("sticky", &check_sticky, 8);
const Part kClosed("closed", &check_closed, 8);

}  // namespace

}  // namespace pyringar::stress
