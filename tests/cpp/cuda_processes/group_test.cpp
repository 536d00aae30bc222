// group_test: ranks in processes with tensors on GPUs, as threads on devices that are host memory:
// cuda_process/group and all below it, with the kernels' own source.
//
//   group_test SEED ROUNDS [PART]

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include <unistd.h>

#include "async_runtime.h"
#include "check.h"
#include "cuda_process/group.h"
#include "oracle.h"

namespace pyringar::stress {

namespace {

using Rank = std::size_t;

// A group of ranks, each on a thread that stands for its process.
class Crew {
 public:
  Crew(Random& random, int world_size, CudaProcessOptions options)
      : world_size_(world_size), options_(options), seed_(random.bits()) {
    const int spread = random.between(0, 2);
    for (int rank = 0; rank < world_size; ++rank) {
      places_.push_back(spread == 0 ? 0 : spread == 1 ? rank % 2 : rank);
    }
  }

  // program(group, rank), on all ranks at once; groups are closed after it, at their own times.
  using Program = std::function<void(CudaProcessGroup& group, int rank)>;
  void run(const Program& program) const {
    SegmentToken token{};
    const SharedMemory memory = SharedMemory::create(Segment::bytes_for(world_size_), "a test");
    Segment::lay_out(memory.data(), world_size_, token);
    on_all_ranks(world_size_, [&](int rank) {
      become_process(rank);
      SharedMemory own = SharedMemory::open(getpid(), memory.fd(), memory.bytes(), "a test");
      const Segment segment = Segment::attach(own.data(), own.bytes(), world_size_, token);
      CudaProcessGroup group(std::move(own), segment, rank, places_[static_cast<Rank>(rank)],
                             options_);
      while (!group.host().absent_ranks().empty()) std::this_thread::yield();
      program(group, rank);
      Random random(seed_ + static_cast<std::uint64_t>(rank));
      dawdle(random);
      group.close();
    });
    run_streams_to_end();
    CHECK(num_allocations() == 0 && num_events() == 0, num_allocations(), " allocations and ",
          num_events(), " events are left");
  }

 private:
  const int world_size_;
  const CudaProcessOptions options_;
  const std::uint64_t seed_;
  std::vector<int> places_;
};

// -- one call, and what it must give --------------------------------------------------------------

struct Shape {
  DType dtype;
  std::size_t numel;
};

struct Case {
  CallKind kind;
  ReduceOp op;
  int divisor;
  int root;
  bool is_async;
  std::vector<Shape> shapes;  // all_reduce: of all tensors; else of the share
  std::uint64_t seed;
};

Case make_case(Random& random, int world_size, std::size_t slot_bytes) {
  Case made{static_cast<CallKind>(random.below(kNumCallKinds)),
            random_op(random),
            1,
            random.between(0, world_size - 1),
            random.one_in(3),
            {},
            random.bits()};
  if (random.one_in(2)) made.kind = CallKind::kAllReduce;
  if (made.op == ReduceOp::kMean) {
    made.op = ReduceOp::kSum;
    made.divisor = world_size;
  }
  const bool has_many = made.kind == CallKind::kAllReduce && random.one_in(4);
  const std::size_t count = has_many ? (random.one_in(6) ? 430 : 1 + random.below(40)) : 1;
  const DType dtype = random_dtype(random);
  for (std::size_t i = 0; i < count; ++i) {
    const DType own = random.one_in(3) ? random_dtype(random) : dtype;
    const std::size_t most = (count > 100 ? 64
                              : count > 1 ? slot_bytes
                                          : 7 * slot_bytes) /
                             item_bytes(own);
    std::size_t numel = random.below(most + 1);
    if (random.one_in(4)) numel = random.below(20);
    if (random.one_in(6)) numel = slot_bytes / item_bytes(own) * random.below(4);
    made.shapes.push_back({own, numel});
  }
  return made;
}

// One rank's tensors of a case: what goes in, the "device's" memory, and what came out.
struct Tensors {
  struct One {
    Shape shape;
    std::vector<std::byte> before;
    Guarded memory;
    std::vector<std::byte> after;

    One(Random& random, Shape s)
        : shape(s), before(bytes()), memory(random, bytes()), after(bytes()) {
      fill(random, s.dtype, before.data(), s.numel);
    }
    std::size_t bytes() const { return shape.numel * item_bytes(shape.dtype); }
    TensorSpan span() const { return {memory.data(), shape.numel, shape.dtype}; }
  };
  std::vector<std::unique_ptr<One>> inputs;
  std::vector<std::unique_ptr<One>> outputs;  // where they are not the inputs
  const std::vector<std::unique_ptr<One>>& results() const {
    return outputs.empty() ? inputs : outputs;
  }
};

Tensors make_tensors(const Case& made, int world_size, int rank) {
  Random random(made.seed * 31 + static_cast<std::uint64_t>(rank));
  Tensors tensors;
  if (made.kind == CallKind::kBarrier) return tensors;
  const auto add = [&](auto& to, Shape shape) {
    to.push_back(std::make_unique<Tensors::One>(random, shape));
  };
  const auto k = static_cast<std::size_t>(world_size);
  for (const Shape& shape : made.shapes) {
    const Shape whole{shape.dtype, shape.numel * k};
    add(tensors.inputs, made.kind == CallKind::kReduceScatter ? whole : shape);
    if (made.kind == CallKind::kReduceScatter) add(tensors.outputs, shape);
    if (made.kind == CallKind::kAllGather) add(tensors.outputs, whole);
  }
  return tensors;
}

ProcessCall call_of(const Case& made, const Tensors& tensors) {
  ProcessCall call;
  call.kind = made.kind;
  call.fold = {made.op, made.divisor};
  call.root = made.kind == CallKind::kBroadcast ? made.root : 0;
  for (const auto& tensor : tensors.results()) call.outputs.push_back(tensor->span());
  if (made.kind == CallKind::kBroadcast) call.inputs = call.outputs;
  if (!tensors.outputs.empty()) call.inputs.push_back(tensors.inputs[0]->span());
  return call;
}

// What result i of this rank must be, from what went in on all ranks.
std::vector<std::byte> expected_of(const Case& made, const std::vector<Tensors>& all, int rank,
                                   std::size_t i) {
  const Tensors::One& first = *all[0].inputs[i];
  const Shape shape = first.shape;
  if (made.kind == CallKind::kBroadcast) return all[static_cast<Rank>(made.root)].inputs[i]->before;
  std::vector<const void*> sources;
  std::vector<std::byte> gathered;
  for (const Tensors& tensors : all) {
    const std::vector<std::byte>& before = tensors.inputs[i]->before;
    sources.push_back(before.data());
    gathered.insert(gathered.end(), before.begin(), before.end());
  }
  if (made.kind == CallKind::kAllGather) return gathered;
  std::vector<std::byte> reduced =
      expected_reduction(shape.dtype, made.op, made.divisor, sources, shape.numel, false);
  if (made.kind == CallKind::kAllReduce) return reduced;
  const auto share = static_cast<std::ptrdiff_t>(reduced.size() / all.size());
  const auto begin = reduced.begin() + share * rank;
  return {begin, begin + share};
}

void copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
}

// Fills, calls and reads on one stream: nothing but its order says that the call is in between.
void enqueue_case(const Case& made, Tensors& tensors, CudaProcessGroup& group,
                  cudaStream_t stream) {
  for (const auto& tensor : tensors.inputs) {
    std::memset(tensor->memory.data(), 0x5a, tensor->bytes());
    copy(tensor->memory.data(), tensor->before.data(), tensor->bytes(), stream);
  }
  if (made.is_async) {
    const CudaProcessGroup::Submitted work = group.submit(call_of(made, tensors), stream);
    CHECK(work.enqueued->wait(kLong), "not enqueued");
    work.done->make_wait(stream, group.device());
  } else {
    group.run(call_of(made, tensors), stream);
  }
  for (const auto& tensor : tensors.results()) {
    copy(tensor->after.data(), tensor->memory.data(), tensor->bytes(), stream);
  }
}

void check_case(const Case& made, const std::vector<Tensors>& all, int rank) {
  const Tensors& own = all[static_cast<Rank>(rank)];
  for (std::size_t i = 0; i < own.results().size(); ++i) {
    const Tensors::One& result = *own.results()[i];
    const std::vector<std::byte> expected = expected_of(made, all, rank, i);
    check_same(result.shape.dtype, result.after.data(), expected.data(), result.shape.numel,
               join(call_name(made.kind), ", rank ", rank, " of ", all.size(), ", tensor ", i,
                    " of ", own.results().size(), made.is_async ? ", async" : ""));
    const bool is_copy = made.kind == CallKind::kAllGather || made.kind == CallKind::kBroadcast;
    CHECK(!is_copy || result.after == expected, "a NaN has other bits");
    result.memory.check_canaries();
  }
  for (std::size_t i = 0; i < own.outputs.size(); ++i) {
    const Tensors::One& input = *own.inputs[i];
    CHECK(std::memcmp(input.memory.data(), input.before.data(), input.bytes()) == 0,
          "an input was written");
  }
}

CudaProcessOptions random_options(Random& random) {
  constexpr std::size_t kSlotBytes[] = {256, 1024, 4096};
  CudaProcessOptions options{kLong};
  options.slot_bytes = kSlotBytes[random.below(3)];
  options.exchange_bytes = random.one_in(2) ? 0 : 2 * options.slot_bytes;
  options.checks_digests = random.one_in(4);
  return options;
}

// Many calls, enqueued before the devices have done the first of them.
void check_collectives(Random& random) {
  const int world_size = random.between(1, 4);
  start_devices(random.bits(), random.one_in(2) ? 0 : random.between(1, 30));
  const CudaProcessOptions options = random_options(random);
  const Crew crew(random, world_size, options);
  std::vector<Case> cases;
  const std::size_t num_cases = 1 + random.below(12);
  for (std::size_t i = 0; i < num_cases; ++i) {
    cases.push_back(make_case(random, world_size, options.slot_bytes));
  }
  std::vector<std::vector<Tensors>> tensors(num_cases);  // by case and rank
  for (std::size_t i = 0; i < num_cases; ++i) {
    for (int r = 0; r < world_size; ++r) {
      tensors[i].push_back(make_tensors(cases[i], world_size, r));
    }
  }
  const std::uint64_t seed = random.bits();
  crew.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    Random own(seed + static_cast<std::uint64_t>(rank));
    const cuda::Stream first(group.device());
    const cuda::Stream second(group.device());
    const cuda::OnDevice guard(group.device());
    const cudaStream_t streams[] = {first.get(), second.get(), nullptr};
    for (std::size_t i = 0; i < num_cases; ++i) {
      if (own.one_in(8)) dawdle(own);
      enqueue_case(cases[i], tensors[i][static_cast<Rank>(rank)], group, streams[own.below(3)]);
    }
    if (own.one_in(2)) return;  // close() has to wait for them
    for (const cudaStream_t stream : streams) {
      cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    }
  });
  for (std::size_t i = 0; i < num_cases; ++i) {
    for (int rank = 0; rank < world_size; ++rank) check_case(cases[i], tensors[i], rank);
  }
}

// -- what goes wrong ------------------------------------------------------------------------------

Case plain_case(std::size_t numel) {
  return {CallKind::kAllReduce, ReduceOp::kSum, 1, 0, false, {{DType::kFloat32, numel}}, 1};
}

void check_unchanged(const Tensors& tensors) {
  for (const auto& tensor : tensors.inputs) {
    CHECK(std::memcmp(tensor->memory.data(), tensor->before.data(), tensor->bytes()) == 0,
          "a tensor was written although ranks do not agree");
  }
}

void check_mismatch(Random& random) {
  const int world_size = random.between(2, 4);
  const int odd = random.between(0, world_size - 1);
  start_devices(random.bits(), 3);
  CudaProcessOptions options = random_options(random);
  const std::size_t numel = 1 + random.below(3000);
  const int what = random.between(0, 3);
  std::vector<Tensors> tensors;
  std::vector<Case> cases;
  for (int rank = 0; rank < world_size; ++rank) {
    Case made = plain_case(numel);
    if (rank == odd && what == 0) made.shapes[0].numel += 1;
    if (rank == odd && what == 1) made.shapes[0].dtype = DType::kInt32;
    if (rank == odd && what == 2) made.op = ReduceOp::kMax;
    if (rank == odd && what == 3) made.kind = CallKind::kBroadcast;
    tensors.push_back(make_tensors(made, world_size, rank));
    cases.push_back(made);
  }
  Crew(random, world_size, options).run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    const auto r = static_cast<Rank>(rank);
    const cuda::Stream stream(group.device());
    const auto call = [&] { enqueue_case(cases[r], tensors[r], group, stream.get()); };
    check_throws(ErrorKind::kArgument, "ranks call different things", call);
    run_streams_to_end();
    check_unchanged(tensors[r]);
    check_throws(ErrorKind::kArgument, "failed before", call);
  });
}

void check_absence(Random& random) {
  const int world_size = random.between(2, 4);
  const int absent = random.between(0, world_size - 1);
  const bool leaves = random.one_in(2);
  start_devices(random.bits(), 3);
  CudaProcessOptions options = random_options(random);
  options.timeout = std::chrono::milliseconds(300);
  const Case made = plain_case(1 + random.below(3000));
  std::vector<Tensors> tensors;
  for (int rank = 0; rank < world_size; ++rank) {
    tensors.push_back(make_tensors(made, world_size, rank));
  }
  std::atomic<int> num_done{0};
  Crew(random, world_size, options).run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    const auto r = static_cast<Rank>(rank);
    const cuda::Stream stream(group.device());
    if (rank == absent) {
      if (leaves) group.close();
      while (num_done < world_size - 1) std::this_thread::yield();
      return;
    }
    const std::string culprit = join("for rank ", absent, " (process ");
    check_throws(leaves ? ErrorKind::kPeerLost : ErrorKind::kTimeout, culprit,
                 [&] { enqueue_case(made, tensors[r], group, stream.get()); });
    run_streams_to_end();
    check_unchanged(tensors[r]);
    num_done += 1;
  });
}

void check_capture(Random& random) {
  start_devices(random.bits(), 3);
  const Case made = plain_case(100);
  std::vector<Tensors> tensors;
  for (int rank = 0; rank < 2; ++rank) tensors.push_back(make_tensors(made, 2, rank));
  Crew(random, 2, random_options(random)).run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    Tensors& own = tensors[static_cast<Rank>(rank)];
    const cuda::Stream stream(group.device());
    if (rank == 0) {
      capture(stream.get());
      for (const bool is_async : {false, true}) {
        Case one = made;
        one.is_async = is_async;
        check_throws(ErrorKind::kUnsupported, "CUDA graph",
                     [&] { enqueue_case(one, own, group, stream.get()); });
      }
      capture(nullptr);
    }
    enqueue_case(made, own, group, stream.get());  // nobody was told
  });
  for (int rank = 0; rank < 2; ++rank) check_case(made, tensors, rank);
}

// The others still have open what this rank has closed.
void check_early_close(Random& random) {
  const int world_size = random.between(2, 4);
  const int early = random.between(0, world_size - 1);
  start_devices(random.bits(), 3);
  const Case made = plain_case(1 + random.below(3000));
  std::vector<Tensors> tensors;
  for (int rank = 0; rank < world_size; ++rank) {
    tensors.push_back(make_tensors(made, world_size, rank));
  }
  std::atomic<bool> has_closed{false};
  Crew(random, world_size, random_options(random)).run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    const cuda::Stream stream(group.device());
    enqueue_case(made, tensors[static_cast<Rank>(rank)], group, stream.get());
    if (rank == early) {
      group.close();
      has_closed = true;
    }
    while (!has_closed) std::this_thread::yield();
  });
  for (int rank = 0; rank < world_size; ++rank) check_case(made, tensors, rank);
}

// What keeps one rank from connecting is raised on all.
void check_connecting(Random& random) {
  const int world_size = random.between(2, 4);
  const int odd = random.between(0, world_size - 1);
  start_devices(random.bits(), 3);
  const bool is_refused = random.one_in(2);
  set_opening(odd, is_refused ? Opening::kIsRefused : Opening::kGivesOtherMemory);
  Crew(random, world_size, random_options(random)).run([&](CudaProcessGroup& group, int rank) {
    const std::string culprit = rank == odd ? "" : join("rank ", odd, " (process ");
    const auto connect = [&] { group.connect(); };
    if (is_refused) {
      const std::string text = message_of(ErrorKind::kCuda, connect);
      CHECK(text.find("cudaIpcOpenMemHandle") != std::string::npos &&
                text.find(culprit) != std::string::npos,
            text);
    } else {
      const std::string text = message_of(ErrorKind::kUnsupported, connect);
      CHECK(text.find("does not arrive") != std::string::npos &&
                text.find(culprit) != std::string::npos,
            text);
    }
  });
}

struct Part {
  const char* name;
  void (*check)(Random& random);
  int one_in;  // rounds
};

constexpr Part kParts[] = {
    {"collectives", &check_collectives, 1},  {"mismatch", &check_mismatch, 4},
    {"absence", &check_absence, 20},         {"capture", &check_capture, 10},
    {"early-close", &check_early_close, 20}, {"connecting", &check_connecting, 10}};

}  // namespace

}  // namespace pyringar::stress

int main(int argc, char** argv) {
  using namespace pyringar::stress;
  const std::uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const std::uint64_t rounds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 20;
  const std::string only = argc > 3 ? argv[3] : "";
  for (std::uint64_t round = 0; round < rounds; ++round) {
    for (const Part& part : kParts) {
      if (only.empty() ? round % static_cast<std::uint64_t>(part.one_in) != 0 : only != part.name) {
        continue;
      }
      set_position({part.name, seed, round});
      Random random(seed * 1000003 + round);
      part.check(random);
    }
  }
  std::printf("ok: %llu rounds\n", static_cast<unsigned long long>(rounds));
  return 0;
}
