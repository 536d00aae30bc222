// cases: see the header.

#include "cases.h"

#include <algorithm>
#include <cstring>

#include "cuda/peers.h"

namespace pyringar::cuda {

bool enable_peers(int a, int b) { return a == b || model::enable_peers(a, b); }
bool is_peer_visible(const void*) { return model::peers.tensors_are_visible; }

}  // namespace pyringar::cuda

namespace pyringar::stress {

void start(Random& random, model::Options options) {
  options.one_in = random.one_in(2) ? 0 : random.between(1, 30);
  options.blocks_per_multiprocessor = random.between(1, 2);
  model::start(random.bits(), options);
}

Streams make_capturable(const cuda::Group& group) {
  Streams streams;
  for (const int device : group.devices()) streams.push_back(make_stream(device));
  return streams;
}

cudaStream_t make_stream(int device) {
  const cuda::OnDevice guard(device);
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return stream;
}

Streams make_streams(Random& random, const cuda::Group& group) {
  Streams streams;
  for (const int device : group.devices()) {
    streams.push_back(random.one_in(4) ? nullptr : make_stream(device));
  }
  return streams;
}

void order(cudaStream_t before, int before_device, cudaStream_t after, int after_device) {
  const cuda::Event event(before_device);
  event.record(before);
  event.make_wait(after, after_device);
}

namespace {

cudaStream_t stream_of(const cuda::Group& group, const Streams& streams, int device) {
  const auto found = std::find(group.devices().begin(), group.devices().end(), device);
  return device == kHost ? nullptr
                         : streams[static_cast<std::size_t>(found - group.devices().begin())];
}

}  // namespace

Case::Case(Random& random, std::vector<int> of_rank, Algorithm algorithm, std::size_t most_parts,
           bool is_large)
    : of_rank_(std::move(of_rank)) {
  const std::size_t num_ranks = of_rank_.size();
  const auto k = static_cast<int>(num_ranks);
  const std::size_t edges[] = {0, 1, 2, 63, 64, 65, 200, 1000, 5000};
  // Many of one dtype do not fit into one launch.
  const bool has_many = most_parts > 10 && algorithm != Algorithm::kRing && random.one_in(8);
  const std::size_t num_parts = has_many ? 130 : 1 + random.below(most_parts);
  const DType dtype_of_many = random_dtype(random);
  collective_.operation = "all_reduce";
  collective_.algorithm = algorithm;
  collective_.fold = random_gpu_fold(random, k);
  if (algorithm != Algorithm::kRing && k > 1) {
    operation_ = static_cast<Operation>(random.below(3));
    root_ = random.below(num_ranks);
  }
  if (operation_ == Operation::kBroadcast) collective_.fold = {};
  collective_.pointers.reserve(num_parts * (num_ranks + 1));
  for (std::size_t p = 0; p < num_parts; ++p) {
    const std::size_t numel = is_large   ? 40'000
                              : has_many ? random.below(20)
                                         : edges[random.below(9)];
    const DType dtype = has_many ? dtype_of_many : random_dtype(random);
    const bool has_output = operation_ == Operation::kReduce && random.one_in(2);
    const std::size_t count = num_ranks + (has_output ? 1 : 0);
    parts_.push_back(
        {dtype, numel, Tensors(random, dtype, count, numel, random_addresses(random)), {}});
    Part& part = parts_.back();
    for (std::size_t i = 0; i < count; ++i) {
      part.after.emplace_back(part.tensors.bytes());
      model::show_tensor(part.tensors[i], part.tensors.bytes(), of_rank_[rank_of(i)]);
    }
    add_buffers(part);
  }
}

// As the bindings lay them out.
void Case::add_buffers(const Part& part) {
  const auto push = [&](std::size_t tensor) {
    collective_.pointers.push_back(part.tensors[tensor]);
    collective_.ranks.push_back(static_cast<int>(rank_of(tensor)));
  };
  const std::size_t num_ranks = of_rank_.size();
  const auto k = static_cast<int>(num_ranks);
  void* const* table = collective_.pointers.data() + collective_.pointers.size();
  if (operation_ == Operation::kBroadcast) push(root_);
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    if (operation_ != Operation::kBroadcast || rank != root_) push(rank);
  }
  switch (operation_) {
    case Operation::kAllReduce:
      return collective_.tensors.push_back({table, table, k, k, part.numel, part.dtype});
    case Operation::kReduce:
      push(part.tensors.count() > num_ranks ? num_ranks : root_);
      return collective_.tensors.push_back({table, table + k, k, 1, part.numel, part.dtype});
    case Operation::kBroadcast:
      return collective_.tensors.push_back(
          {table, table + 1, 1, k - 1, part.tensors.bytes(), DType::kUInt8});
  }
}

Case::~Case() {
  for (const Part& part : parts_) {
    for (std::size_t i = 0; i < part.tensors.count(); ++i) model::hide_tensor(part.tensors[i]);
  }
}

void Case::fill(const cuda::Group& group, const Streams& streams) {
  for (std::size_t rank = 0; rank < of_rank_.size(); ++rank) {
    fill_rank(rank, stream_of(group, streams, of_rank_[rank]));
  }
}

void Case::fill_rank(std::size_t rank, cudaStream_t stream) {
  for (Part& part : parts_) {
    const std::size_t bytes = part.tensors.bytes();
    for (std::size_t i = 0; bytes > 0 && i < part.tensors.count(); ++i) {
      if (rank_of(i) != rank) continue;
      const void* before = part.tensors.before()[i];
      if (of_rank_[rank] == kHost) {
        model::host_writes(part.tensors[i], bytes);
        std::memcpy(part.tensors[i], before, bytes);
        continue;
      }
      const cuda::OnDevice guard(of_rank_[rank]);
      ok(cudaMemcpyAsync(part.tensors[i], before, bytes, cudaMemcpyDefault, stream),
         "cudaMemcpyAsync");
    }
  }
}

void Case::read(const cuda::Group& group, const Streams& streams) {
  for (Part& part : parts_) {
    const std::size_t bytes = part.tensors.bytes();
    for (std::size_t i = 0; bytes > 0 && i < part.tensors.count(); ++i) {
      const int device = of_rank_[rank_of(i)];
      if (device == kHost) {
        model::host_reads(part.tensors[i], bytes);
        std::memcpy(part.after[i].data(), part.tensors[i], bytes);
        continue;
      }
      const cuda::OnDevice guard(device);
      ok(cudaMemcpyAsync(part.after[i].data(), part.tensors[i], bytes, cudaMemcpyDefault,
                         stream_of(group, streams, device)),
         "cudaMemcpyAsync");
    }
  }
}

void Case::call(cuda::Group& group, const Streams& streams) {
  fill(group, streams);
  group.run(collective_, streams);
  read(group, streams);
}

void Case::check() const {
  for (const Part& part : parts_) {
    const std::vector<const void*> before = part.tensors.before();
    const std::size_t num_ranks = of_rank_.size();
    const std::vector<const void*> sources(before.begin(),
                                           before.begin() + static_cast<std::ptrdiff_t>(num_ranks));
    const std::vector<std::byte> reduced =
        expected_reduction(part.dtype, collective_.fold, sources, part.numel,
                           collective_.algorithm == Algorithm::kRing);
    const std::size_t output = part.tensors.count() > num_ranks ? num_ranks : root_;
    constexpr const char* kNames[] = {"all_reduce", "reduce", "broadcast"};
    for (std::size_t i = 0; i < part.tensors.count(); ++i) {
      const bool is_reduced =
          operation_ == Operation::kAllReduce || (operation_ == Operation::kReduce && i == output);
      const void* copied = before[operation_ == Operation::kBroadcast ? root_ : i];
      check_same(part.dtype, part.after[i].data(), is_reduced ? reduced.data() : copied, part.numel,
                 join(kNames[static_cast<int>(operation_)], " with root ", root_, ", ",
                      algorithm_name(collective_.algorithm), " ", op_name(collective_.fold.op),
                      ", tensor ", i, " of ", num_ranks, " ranks"));
    }
    part.tensors.check_canaries();
  }
}

}  // namespace pyringar::stress
