#include "rank_threads.h"

#include <stddef.h>
#include <sys/mman.h>
#include <unistd.h>

#include <thread>

namespace pyringar::stress {

RankThreads::RankThreads(Random& random, int world_size, CudaProcessOptions options, int one_in,
                         bool loads_eagerly)
    : world_size_(world_size),
      options_(std::move(options)),
      seed_(random.bits()),
      // Sometimes close to 2^32, so that the counters wrap.
      first_message_(random.one_in(2) ? 0 : 0u - static_cast<std::uint32_t>(random.below(60))),
      // Sometimes so far behind that the next call must raise `reduced`.
      last_reduced_(first_message_ - (random.one_in(2) ? 0 : (1u << 30) - 8)) {
  const int spread = random.between(0, 2);
  for (int rank = 0; rank < world_size; ++rank) {
    devices_.push_back(spread == 0 ? 0 : spread == 1 ? rank % 2 : rank);
  }
  Options devices;
  devices.one_in = one_in;
  devices.hosts_see_each_other = true;
  devices.has_one_queue = random.one_in(3);
  devices.loads_eagerly = loads_eagerly;
  start(random.bits(), devices);
}

void RankThreads::run(const Program& program) const {
  run_groups(1, [&](const Groups& groups, int rank) { program(*groups[0], rank); });
}

void RankThreads::run_groups(int num_groups,
                             const std::function<void(const Groups&, int)>& program) const {
  const std::vector<SharedMemory> memory = make_memory(num_groups);
  on_all_ranks(world_size_, [&](int rank) {
    become_process(rank);
    try {
      cuda::check(cudaSetDevice(device(rank)), "cudaSetDevice");
      Groups groups = join(memory, rank);
      try {
        program(groups, rank);
      } catch (const Killed&) {
        for (auto& group : groups) static_cast<void>(group.release());
        return;
      }
      Random random(seed_ + static_cast<std::uint64_t>(rank));
      dawdle(random);
      for (auto& group : groups) group->close();
    } catch (const std::exception& error) {
      CHECK(false, "rank ", rank, ": ", error.what());
    }
  });
  run_to_end();
  // Slots outlive close() while other ranks read them. The process's next group frees them.
  std::thread([this] {
    become_process(world_size_);  // a process that did not exist before
    SharedMemory memory = SharedMemory::create(Segment::bytes_for(1), "a test");
    const Segment segment = Segment::lay_out(memory.data(), 1, SegmentToken{});
    CudaProcessGroup(std::move(memory), segment, 0, 0, options_).close();
  }).join();
  CHECK(num_allocations() == 0 && num_events() == 0, num_allocations(), " allocations and ",
        num_events(), " events are left");
}

std::vector<SharedMemory> RankThreads::make_memory(int num_groups) const {
  std::vector<SharedMemory> memory;
  for (int i = 0; i < num_groups; ++i) {
    memory.push_back(SharedMemory::create(Segment::bytes_for(world_size_), "a test"));
    const Segment segment = Segment::lay_out(memory.back().data(), world_size_, SegmentToken{});
    for (int rank = 0; rank < world_size_; ++rank) {
      DeviceLine& device = segment.device(rank);
      segment.line(rank).announced.value = first_message_;
      device.announced.value = first_message_;
      device.finished.value = first_message_;
      segment.line(rank).reduced.value = last_reduced_;
      device.reduced.value = last_reduced_;
      for (std::uint32_t i = 0; i < kStagingSlots; ++i)
        segment.head(rank, i).number = first_message_;
    }
  }
  return memory;
}

RankThreads::Groups RankThreads::join(const std::vector<SharedMemory>& memory, int rank) const {
  Groups groups;
  for (const SharedMemory& one : memory) {
    SharedMemory own = SharedMemory::open(getpid(), one.fd(), one.bytes(), "a test");
    const Segment segment = Segment::attach(own.data(), world_size_, SegmentToken{});
    groups.push_back(
        std::make_unique<CudaProcessGroup>(std::move(own), segment, rank, device(rank), options_));
    while (!groups.back()->host().absent_ranks().empty()) std::this_thread::yield();
  }
  return groups;
}

void RankThreads::kill(CudaProcessGroup& group) const {
  const Segment& segment = group.host().segment();
  const int rank = group.host().rank();
  kill_process(rank);
  segment.line(rank).process.start_ticks += 1;  // as if the process id was reused
  // The dead process's threads see a private copy of the segment from now on.
  auto* const begin =
      reinterpret_cast<std::byte*>(&segment.failure()) - offsetof(SegmentHeader, failure);
  const std::size_t bytes = Segment::bytes_for(world_size_);
  const std::vector<std::byte> copy(begin, begin + bytes);
  const int fixed = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
  CHECK(mmap(begin, bytes, PROT_READ | PROT_WRITE, fixed, -1, 0) == begin, "cannot be cut off");
  std::memcpy(begin, copy.data(), bytes);
}

CudaProcessOptions random_options(Random& random) {
  constexpr std::size_t kSlotBytes[] = {256, 1024, 4096};
  CudaProcessOptions options{kLong};
  options.slot_bytes = kSlotBytes[random.below(3)];
  options.most_shared_slot_bytes = options.slot_bytes * (std::size_t{1} << random.below(3));
  options.exchange_bytes = random.one_in(2) ? 0 : 2 * options.slot_bytes;
  return options;
}

Case make_case(Random& random, int world_size, std::size_t slot_bytes) {
  Case made{random_kind(random),
            random_gpu_fold(random, world_size),
            random.between(0, world_size - 1),
            {},
            random.bits(),
            random.one_in(3)};
  if (random.one_in(2)) made.kind = CallKind::kAllReduce;
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

Case plain_case(std::size_t numel) {
  return {CallKind::kAllReduce, Fold{}, 0, {{DType::kFloat32, numel}}, 1};
}

AllTensors::AllTensors(const Case& made, int world_size) {
  for (int rank = 0; rank < world_size; ++rank) {
    tensors_.push_back(std::make_unique<CallTensors>(make_tensors(made, world_size, rank)));
    for (const Tensors& result : tensors_.back()->results()) {
      tensors_.back()->after.emplace_back(result.bytes());
    }
  }
}

AllTensors::~AllTensors() {
  for (const auto& tensors : tensors_) {
    for (const auto* all : {&tensors->inputs, &tensors->outputs}) {
      for (const Tensors& tensor : *all) hide_tensor(tensor[0]);
    }
  }
}

void AllTensors::check(const Case& made, int rank) const {
  std::vector<const CallTensors*> all;
  for (const auto& tensors : tensors_) all.push_back(tensors.get());
  check_case(made, all, rank);
}

std::vector<AllTensors> make_all_tensors(const std::vector<Case>& cases, int world_size) {
  std::vector<AllTensors> all;
  for (const Case& made : cases) all.emplace_back(made, world_size);
  return all;
}

namespace {

// Write the tensors, which the caller may do after an error.
void write_again(const CallTensors& tensors) {
  for (const auto* all : {&tensors.inputs, &tensors.outputs}) {
    for (const Tensors& tensor : *all) host_writes(tensor[0], tensor.bytes());
  }
}

void copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
}

}  // namespace

CudaProcessGroup::Submitted enqueue_case(const Case& made, CallTensors& tensors,
                                         CudaProcessGroup& group, cudaStream_t stream) {
  for (const auto* all : {&tensors.inputs, &tensors.outputs}) {
    for (const Tensors& tensor : *all) show_tensor(tensor[0], tensor.bytes(), group.device());
  }
  for (const Tensors& tensor : tensors.inputs) {
    std::memset(tensor[0], 0x5a, tensor.bytes());
    copy(tensor[0], tensor.before()[0], tensor.bytes(), stream);
  }
  CudaProcessGroup::Submitted work;
  if (made.is_async) {
    work = group.submit(call_of(made, tensors, group.host().world_size()), stream);
    while (!work.enqueued->is_completed())
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    const bool is_refused = work.enqueued->exception() != nullptr;
    if (is_refused) {
      if (work.done->is_done()) write_again(tensors);
      std::rethrow_exception(group.failure_of(work));
    }
    work.done->make_wait(stream, group.device());
  } else {
    group.run(call_of(made, tensors, group.host().world_size()), stream);
    work = group.enqueued(stream);
  }
  for (std::size_t i = 0; i < tensors.after.size(); ++i) {
    copy(tensors.after[i].data(), tensors.results()[i][0], tensors.after[i].size(), stream);
  }
  return work;
}

void synchronize(cudaStream_t stream) {
  cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace pyringar::stress
