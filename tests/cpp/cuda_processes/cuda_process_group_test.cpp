// cuda_process_group_test: CudaProcessGroup with ranks as threads on the modelled runtime, with the
// kernels' own source.
#include <unistd.h>

#include <string>

#include "rank_threads.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

// Collectives give right results when many are enqueued before the devices run the first.
void check_collectives(Random& random) {
  const int world_size = random.between(1, 4);
  const CudaProcessOptions options = random_options(random);
  const RankThreads ranks(random, world_size, options,
                          random.one_in(2) ? 0 : random.between(1, 30));
  std::vector<Case> cases;
  const std::size_t num_cases = 1 + random.below(12);
  for (std::size_t i = 0; i < num_cases; ++i) {
    cases.push_back(make_case(random, world_size, options.slot_bytes));
  }
  std::vector<AllTensors> tensors = make_all_tensors(cases, world_size);
  const std::uint64_t seed = random.bits();
  ranks.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    Random own(seed + static_cast<std::uint64_t>(rank));
    const cuda::Stream first(group.device());
    const cuda::Stream second(group.device());
    const cuda::OnDevice guard(group.device());
    const cudaStream_t streams[] = {first.get(), second.get(), nullptr};
    for (std::size_t i = 0; i < num_cases; ++i) {
      if (own.one_in(8)) dawdle(own);
      enqueue_case(cases[i], tensors[i][rank], group, streams[own.below(3)]);
    }
    CHECK(contexts() == std::set<int>{ranks.device(rank)}, "a context on another device");
    if (own.one_in(2)) return;  // then close() waits for the calls
    for (const cudaStream_t stream : streams) synchronize(stream);
    const DeviceLine& words = group.host().segment().device(rank);
    const std::uint32_t behind = words.finished.value - words.reduced.value;
    CHECK(behind <= 1u << 30, "a word falls behind by ", behind);
  });
  for (std::size_t i = 0; i < num_cases; ++i) {
    for (int rank = 0; rank < world_size; ++rank) tensors[i].check(cases[i], rank);
  }
}

// Two groups of the same ranks. Each rank calls them from two threads, in different orders.
void check_two_groups(Random& random) {
  const int world_size = random.between(2, 3);
  const CudaProcessOptions options = random_options(random);
  const RankThreads ranks(random, world_size, options, random.between(1, 30));
  std::vector<Case> cases;
  for (int i = 0; i < 6; ++i) {
    cases.push_back(make_case(random, world_size, options.slot_bytes));
    cases.back().is_async = false;
  }
  std::vector<AllTensors> tensors = make_all_tensors(cases, world_size);
  ranks.run_groups(2, [&](const RankThreads::Groups& groups, int rank) {
    for (const auto& group : groups) group->connect();
    on_all_ranks(2, [&](int which) {
      CudaProcessGroup& group = *groups[static_cast<Rank>(which)];
      const cuda::OnDevice guard(group.device());
      const cuda::Stream stream(group.device());
      for (std::size_t i = static_cast<Rank>(which); i < cases.size(); i += 2) {
        enqueue_case(cases[i], tensors[i][rank], group, stream.get());
      }
      synchronize(stream.get());
    });
  });
  for (std::size_t i = 0; i < cases.size(); ++i) {
    for (int rank = 0; rank < world_size; ++rank) tensors[i].check(cases[i], rank);
  }
}

void check_mismatch(Random& random) {
  const int world_size = random.between(2, 4);
  const int odd = random.between(0, world_size - 1);
  const RankThreads ranks(random, world_size, random_options(random));
  const std::size_t numel = 1 + random.below(3000);
  const int what = random.between(0, 3);
  std::vector<Case> cases;
  for (int rank = 0; rank < world_size; ++rank) {
    Case made = plain_case(numel);
    if (rank == odd && what == 0) made.shapes[0].numel += 1;
    if (rank == odd && what == 1) made.shapes[0].dtype = DType::kInt32;
    if (rank == odd && what == 2) made.fold.op = ReduceOp::kMax;
    if (rank == odd && what == 3) made.kind = CallKind::kBroadcast;
    cases.push_back(made);
  }
  std::vector<AllTensors> tensors = make_all_tensors(cases, world_size);
  ranks.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    const auto r = static_cast<Rank>(rank);
    const cuda::Stream stream(group.device());
    const auto call = [&] { enqueue_case(cases[r], tensors[r][rank], group, stream.get()); };
    check_throws(ErrorKind::kArgument, "ranks call different things", call);
    run_to_end();
    check_unchanged(tensors[r][rank]);
    check_throws(ErrorKind::kArgument, "failed before", call);
  });
}

void check_absence(Random& random) {
  const int world_size = random.between(2, 4);
  const int absent = random.between(0, world_size - 1);
  const bool leaves = random.one_in(2);
  CudaProcessOptions options = random_options(random);
  options.timeout = std::chrono::milliseconds(300);
  const RankThreads ranks(random, world_size, options);
  const Case made = plain_case(1 + random.below(3000));
  AllTensors tensors(made, world_size);
  std::atomic<int> num_done{0};
  ranks.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    const cuda::Stream stream(group.device());
    if (rank == absent) {
      if (leaves) group.close();
      while (num_done < world_size - 1) std::this_thread::yield();
      return;
    }
    const std::string culprit = join("for rank ", absent, " (process ");
    check_throws(leaves ? ErrorKind::kPeerLost : ErrorKind::kTimeout, culprit,
                 [&] { enqueue_case(made, tensors[rank], group, stream.get()); });
    run_to_end();
    check_unchanged(tensors[rank]);
    num_done += 1;
  });
}

void check_capture(Random& random) {
  const RankThreads ranks(random, 2, random_options(random));
  const Case made = plain_case(100);
  AllTensors tensors(made, 2);
  ranks.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    CallTensors& own = tensors[rank];
    const cuda::Stream stream(group.device());
    if (rank == 0) {
      const auto mode = cudaStreamCaptureModeRelaxed;
      cuda::check(cudaStreamBeginCapture(stream.get(), mode), "cudaStreamBeginCapture");
      for (const bool is_async : {false, true}) {
        Case one = made;
        one.is_async = is_async;
        check_throws(ErrorKind::kUnsupported, "CUDA graph",
                     [&] { enqueue_case(one, own, group, stream.get()); });
      }
      cudaGraph_t graph = nullptr;
      cuda::check(cudaStreamEndCapture(stream.get(), &graph), "cudaStreamEndCapture");
      cuda::check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    }
    // the refused calls were not announced to the other rank, so both ranks agree on this call
    enqueue_case(made, own, group, stream.get());
  });
  for (int rank = 0; rank < 2; ++rank) tensors.check(made, rank);
}

// A rank closes while other ranks still map its slots.
void check_early_close(Random& random) {
  const int world_size = random.between(2, 4);
  const int early = random.between(0, world_size - 1);
  const RankThreads ranks(random, world_size, random_options(random));
  const Case made = plain_case(1 + random.below(3000));
  AllTensors tensors(made, world_size);
  std::atomic<bool> has_closed{false};
  ranks.run([&](CudaProcessGroup& group, int rank) {
    group.connect();
    const cuda::Stream stream(group.device());
    enqueue_case(made, tensors[rank], group, stream.get());
    if (rank == early) {
      group.close();
      has_closed = true;
    }
    while (!has_closed) std::this_thread::yield();
  });
  for (int rank = 0; rank < world_size; ++rank) tensors.check(made, rank);
}

// If one rank cannot connect, all ranks raise the reason and a hint.
void check_connecting(Random& random) {
  struct Obstacle {
    ErrorKind kind;
    std::string words;
    std::function<void(int odd)> set;
  };
  const Obstacle obstacles[] = {
      {ErrorKind::kCuda, "cudaIpcOpenMemHandle",
       [](int odd) { set_opening(odd, Opening::kIsRefused); }},
      {ErrorKind::kUnsupported, "shared with other processes fails",
       [](int odd) { set_opening(odd, Opening::kGivesOtherMemory); }},
      {ErrorKind::kUnsupported, "cudaHostRegister",
       [](int odd) { refuse(odd, Refused::kRegistration); }},
      {ErrorKind::kUnsupported, "no stream memory operations",
       [](int odd) { refuse(odd, Refused::kStreamMemory); }},
  };
  const int world_size = random.between(2, 4);
  const int odd = random.between(0, world_size - 1);
  const std::size_t which = random.below(std::size(obstacles));
  const Obstacle& obstacle = obstacles[which];
  const RankThreads ranks(random, world_size, random_options(random));
  obstacle.set(odd);
  const bool is_elsewhere = random.one_in(2);  // true: rank `odd` claims to be another process
  const int refused = odd == 0 ? 1 : 0;
  show_device(odd, ranks.device(odd));
  ranks.run([&](CudaProcessGroup& group, int rank) {
    if (rank == odd && is_elsewhere) group.host().segment().line(rank).process = {getppid(), 0};
    const std::string culprit = rank == odd ? "" : join("rank ", odd, " (process ");
    const std::string text = message_of(obstacle.kind, [&] { group.connect(); });
    CHECK(text.find(obstacle.words) != std::string::npos, text);
    CHECK(text.find(culprit) != std::string::npos, text);
    if (which != 0) return;
    const bool is_hidden = is_elsewhere && ranks.device(refused) != ranks.device(odd);
    const bool names_process = text.find("in one process") != std::string::npos;
    CHECK(names_process == !is_elsewhere, text);
    CHECK((text.find("CUDA_VISIBLE_DEVICES") != std::string::npos) == is_hidden, text);
  });
}

const Part kCollectives("collectives", &check_collectives);
const Part kTwoGroups("two-groups", &check_two_groups, 2);
const Part kMismatch("mismatch", &check_mismatch, 4);
const Part kAbsence("absence", &check_absence, 20);
const Part kCapture("capture", &check_capture, 10);
const Part kEarlyClose("early-close", &check_early_close, 20);
const Part kConnecting("connecting", &check_connecting, 2);

}  // namespace

}  // namespace pyringar::stress
