// rules_test: the model itself: for every rule programs that keep it, and some that do not and are
// caught. What judges the engine is judged here; in the other files what concerns captures, and
// memory, devices and processes.
//
//   rules_test SEEDS

#include <cstdio>
#include <cstdlib>

#include "rules.h"

namespace pyringar::model {

namespace {

// -- order ----------------------------------------------------------------------------------------

void check_races() {
  Memory memory;
  Memory other;
  const cudaStream_t one = stream_on(0);
  const cudaStream_t two = stream_on(0);
  set(memory, 1, one);
  order(one, two);
  set(memory, 2, two);  // an event orders them
  ok(cudaStreamSynchronize(two));
  set(memory, 3, one);  // and here the host does
  run_to_end();
  CHECK(memory.first() == 3, "not in order");
  set(memory, 4, one);
  breaks("race", "unordered", [&] { set(memory, 5, two); });
  set(memory, 1, one);
  breaks("race", "a launch of fused", [&] { ok(launch_plain(two, memory, other)); });
  set(memory, 1, one);
  breaks("race", "the host has read", [&] { host_reads(memory, kBytes); });
}

// The slots of a ring are flags' business; what else it touches is not.
void check_races_of_rings() {
  Waiting waiting;
  const cudaStream_t stream = stream_on(0);
  const auto races = [&](auto&& program) {
    waiting.run(stream);
    breaks("race", "unordered", program);
  };
  races([&] { host_writes(waiting.input, kBytes); });
  races([&] { host_reads(waiting.output, kBytes); });
  races([&] { host_writes(waiting.ports, sizeof(cuda::RingPorts)); });
  races([&] { host_reads(waiting.args.ports->base, 4); });
}

// Two streams, two orders.
void check_drawn_order() {
  std::set<std::uint32_t> last;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    start(seed);
    Words words;
    words.write(stream_on(0), 1);
    words.write(stream_on(0), 2);
    run_to_end();
    last.insert(words.first());
  }
  CHECK(last.size() == 2, "streams always run in the same order");
}

void check_streams() {
  Memory from;
  Memory to;
  const cudaStream_t elsewhere = stream_on(1);
  const cudaStream_t stream = stream_on(0);
  is(launch_plain(elsewhere, from, to), cudaErrorInvalidResourceHandle);
  set(from, 1, stream);
  ok(cudaStreamDestroy(stream));  // what is there still runs
  breaks("order", "destroyed", [&] { set(from, 2, stream); });
}

void check_one_queue() {
  Words words;
  const cudaStream_t one = stream_on(0);
  const cudaStream_t two = stream_on(0);
  words.write(two, 1);
  words.await(one, 1);
  run_to_end();
  breaks("deadlock", "a wait for a word", [&] {
    words.await(one, 2);
    words.write(two, 2);
  });
}

void check_default_stream() {
  Memory memory;
  const cudaStream_t blocking = stream_on(0, cudaStreamDefault);
  const cudaStream_t own = stream_on(0);
  set(memory, 1, blocking);
  set(memory, 2, nullptr);
  set(memory, 3, blocking);
  run_to_end();
  CHECK(memory.first() == 3, "not in order");
  breaks("race", "unordered", [&] {
    set(memory, 1, nullptr);
    set(memory, 2, own);
  });
}

// A wait is for what had been recorded when it was asked for.
void check_events() {
  Memory memory;
  const cudaStream_t one = stream_on(0);
  const cudaStream_t two = stream_on(0);
  Event event;
  breaks("race", "unordered", [&] {
    ok(cudaEventRecord(event.event, one));
    ok(cudaStreamWaitEvent(two, event.event, 0));
    set(memory, 1, one);
    ok(cudaEventRecord(event.event, one));
    set(memory, 2, two);
  });
  is(cudaEventRecord(event.event, stream_on(1)), cudaErrorInvalidResourceHandle);
}

void check_hosts() {
  Memory memory;
  host_writes(memory, kBytes);
  on_thread([&] { host_writes(memory, kBytes); });  // started after it
  breaks("race", "the host reads", [&] { host_reads(memory, kBytes); });
  on_thread([&] { host_writes(memory, kBytes); });
  meet_hosts();
  host_writes(memory, kBytes);
  // The host's own memcpy, of memory that a stream writes.
  void* pinned = nullptr;
  ok(cudaHostAlloc(&pinned, kBytes, cudaHostAllocDefault));
  const cudaStream_t stream = stream_on(0);
  std::vector<char> kept(kBytes);
  breaks("race", "memcpy", [&] {
    set(pinned, 1, stream);
    on_thread(&run_to_end);  // done, and this thread has not waited for it
    std::memcpy(kept.data(), pinned, kept.size());
  });
  ok(cudaFreeHost(pinned));
}

// -- what waits for the device --------------------------------------------------------------------

// A kernel that waits for ever is told by every call that waits for it.
void check_calls_that_wait() {
  Waiting waiting;
  void* made = nullptr;
  Memory memory;
  Memory other(1);  // cudaFree waits for peers, too
  const cudaStream_t stream = stream_on(0);
  const auto waits = [&](const char* words, auto&& call) {
    ok(waiting.launch(stream));
    breaks("deadlock", words, call);
  };
  waits("cudaMalloc waits for ever", [&] { cudaMalloc(&made, 1); });
  waits("cudaHostAlloc waits for ever", [&] { cudaHostAlloc(&made, 1, 0); });
  waits("cudaFree waits for ever", [&] { cudaFree(memory); });
  waits("cudaFree waits for ever", [&] {
    cudaSetDevice(1);
    cudaFree(other);
  });
  ok(cudaSetDevice(0));
  waits("loading a kernel", [&] { load(plain_kernel()); });
}

// And orders nothing, unless it is said to.
void check_calls_that_order_nothing() {
  Memory memory;
  Memory other;
  void* pinned = nullptr;
  const cudaStream_t one = stream_on(0);
  const auto orders_nothing = [&](auto&& call) {
    set(memory, 1, one);
    call();
    breaks("race", "the host reads", [&] { host_reads(memory, kBytes); });
  };
  orders_nothing([&] { ok(launch_plain(stream_on(0), other, other)); });
  orders_nothing([&] { ok(load(waiting_kernel())); });
  orders_nothing([] { Memory(); });
  orders_nothing([&] { ok(cudaHostAlloc(&pinned, 1, 0)); });
  ok(cudaFreeHost(pinned));
  set(memory, 1, one);
  ok(cudaDeviceSynchronize());
  host_reads(memory, kBytes);
}

void check_residency() {
  const cudaStream_t stream = stream_on(0);
  Waiting too_large(7);
  is(too_large.launch(stream), cudaErrorCooperativeLaunchTooLarge);
  Memory from;
  Memory to;
  const cudaStream_t other = stream_on(0);
  ok(load(plain_kernel()));
  Waiting all(6);
  breaks("deadlock", "a launch of fused", [&] {
    all.run(stream);
    ok(launch_plain(other, from, to));
    ok(cudaStreamSynchronize(other));
  });
  Waiting some(5);
  some.run(stream);
  ok(launch_plain(other, from, to));
  ok(cudaStreamSynchronize(other));
  breaks("deadlock", "process 0, cuda:0: a launch of ring", [&] {  // it does not begin
    some.run(other);
  });
  void* arguments[] = {&some.args};
  breaks("resident", "not cooperative",
         [&] { cudaLaunchKernel(waiting_kernel(), dim3(5), dim3(4), arguments, 0, stream); });
}

void check_lazy_loading() {
  Memory from;
  Memory to;
  Waiting waiting;
  const cudaStream_t stream = stream_on(0);
  const cudaStream_t other = stream_on(0);
  ok(waiting.launch(stream));
  breaks("deadlock", "loading a kernel", [&] { ok(launch_plain(other, from, to)); });
  ok(load(plain_kernel()));
  ok(waiting.launch(stream));
  ok(launch_plain(other, from, to));
  ok(cudaStreamSynchronize(other));
  drop_work();
}

void check_eager_loading() {
  Memory from;
  Memory to;
  Waiting waiting;
  ok(waiting.launch(stream_on(0)));
  const cudaStream_t other = stream_on(0);
  ok(launch_plain(other, from, to));
  ok(load(plain_kernel()));
  ok(cudaStreamSynchronize(other));
  drop_work();
}

void check_launch_blocking() {
  const cudaStream_t stream = stream_on(0);
  Memory from;
  Memory to;
  ok(launch_plain(stream, from, to));
  host_reads(to, kBytes);
  Waiting waiting;
  breaks("deadlock", "CUDA_LAUNCH_BLOCKING", [&] { ok(waiting.launch(stream)); });
}

const std::vector<Rule> kStreamRules = {
    {"races", &check_races},
    {"races-of-rings", &check_races_of_rings},
    {"drawn-order", &check_drawn_order},
    {"streams", &check_streams},
    {"one-queue", &check_one_queue, {.has_one_queue = true}},
    {"default", &check_default_stream},
    {"events", &check_events},
    {"hosts", &check_hosts},
    {"waiting", &check_calls_that_wait},
    {"ordering", &check_calls_that_order_nothing},
    {"residency", &check_residency},
    {"lazy", &check_lazy_loading},
    {"eager", &check_eager_loading, {.loads_eagerly = true}},
    {"blocking", &check_launch_blocking, {.launch_blocking = true}}};

}  // namespace

}  // namespace pyringar::model

int main(int argc, char** argv) {
  using namespace pyringar::model;
  const std::uint64_t seeds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    for (const auto* rules : {&kStreamRules, &kCaptureRules, &kDeviceRules}) {
      for (const Rule& rule : *rules) {
        pyringar::stress::set_position({rule.name, seed, 0});
        try {
          start(seed, rule.options);
          rule.check();
        } catch (const Broken& broken) {
          CHECK(false, broken.what());
        }
      }
    }
  }
  std::printf("ok: %llu seeds\n", static_cast<unsigned long long>(seeds));
  return 0;
}
