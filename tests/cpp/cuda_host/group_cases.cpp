#include "group_cases.h"

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

Streams make_capturable(const cuda::DeviceGroup& group) {
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

Streams make_streams(Random& random, const cuda::DeviceGroup& group) {
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

cudaStream_t stream_of(const cuda::DeviceGroup& group, const Streams& streams, int device) {
  const auto found = std::find(group.devices().begin(), group.devices().end(), device);
  return device == kHost ? nullptr
                         : streams[static_cast<std::size_t>(found - group.devices().begin())];
}

}  // namespace

GroupCase::GroupCase(Random& random, std::vector<int> of_rank, Algorithm algorithm,
                     std::size_t most_tensors, bool is_large)
    : of_rank_(std::move(of_rank)) {
  const std::size_t num_ranks = of_rank_.size();
  const auto k = static_cast<int>(num_ranks);
  const std::size_t edges[] = {0, 1, 2, 63, 64, 65, 200, 1000, 5000};
  const bool has_many = most_tensors > 10 && algorithm != Algorithm::kRing && random.one_in(8);
  const std::size_t num_tensors = has_many ? 130 : 1 + random.below(most_tensors);
  const DType dtype_of_many = random_dtype(random);
  collective_.operation = "all_reduce";
  collective_.algorithm = algorithm;
  collective_.fold = random_gpu_fold(random, k);
  if (algorithm != Algorithm::kRing && k > 1) {
    kind_ = static_cast<Kind>(random.below(3));
    root_ = random.below(num_ranks);
  }
  if (kind_ == Kind::kBroadcast) collective_.fold = {};
  collective_.pointers.reserve(num_tensors * (num_ranks + 1));
  for (std::size_t p = 0; p < num_tensors; ++p) {
    const std::size_t numel = is_large   ? 40'000
                              : has_many ? random.below(20)
                                         : edges[random.below(9)];
    const DType dtype = has_many ? dtype_of_many : random_dtype(random);
    const bool has_output = kind_ == Kind::kReduce && random.one_in(2);
    const std::size_t count = num_ranks + (has_output ? 1 : 0);
    tensors_.push_back(
        {dtype, numel, Tensors(random, dtype, count, numel, random_addresses(random)), {}});
    CaseTensor& tensor = tensors_.back();
    for (std::size_t i = 0; i < count; ++i) {
      tensor.after.emplace_back(tensor.tensors.bytes());
      model::show_tensor(tensor.tensors[i], tensor.tensors.bytes(), of_rank_[rank_of(i)]);
    }
    add_buffers(tensor);
  }
}

// Lay out the pointers as the bindings do.
void GroupCase::add_buffers(const CaseTensor& tensor) {
  const auto push = [&](std::size_t index) {
    collective_.pointers.push_back(tensor.tensors[index]);
    collective_.ranks.push_back(static_cast<int>(rank_of(index)));
  };
  const std::size_t num_ranks = of_rank_.size();
  const auto k = static_cast<int>(num_ranks);
  void* const* table = collective_.pointers.data() + collective_.pointers.size();
  if (kind_ == Kind::kBroadcast) push(root_);
  for (std::size_t rank = 0; rank < num_ranks; ++rank) {
    if (kind_ != Kind::kBroadcast || rank != root_) push(rank);
  }
  switch (kind_) {
    case Kind::kAllReduce:
      return collective_.tensors.push_back({table, table, k, k, tensor.numel, tensor.dtype});
    case Kind::kReduce:
      push(tensor.tensors.count() > num_ranks ? num_ranks : root_);
      return collective_.tensors.push_back({table, table + k, k, 1, tensor.numel, tensor.dtype});
    case Kind::kBroadcast:
      return collective_.tensors.push_back(
          {table, table + 1, 1, k - 1, tensor.tensors.bytes(), DType::kUInt8});
  }
}

GroupCase::~GroupCase() {
  for (const CaseTensor& tensor : tensors_) {
    for (std::size_t i = 0; i < tensor.tensors.count(); ++i) model::hide_tensor(tensor.tensors[i]);
  }
}

void GroupCase::fill(const cuda::DeviceGroup& group, const Streams& streams) {
  for (std::size_t rank = 0; rank < of_rank_.size(); ++rank) {
    fill_rank(rank, stream_of(group, streams, of_rank_[rank]));
  }
}

void GroupCase::fill_rank(std::size_t rank, cudaStream_t stream) {
  for (CaseTensor& tensor : tensors_) {
    const std::size_t bytes = tensor.tensors.bytes();
    for (std::size_t i = 0; bytes > 0 && i < tensor.tensors.count(); ++i) {
      if (rank_of(i) != rank) continue;
      const void* before = tensor.tensors.before()[i];
      if (of_rank_[rank] == kHost) {
        model::host_writes(tensor.tensors[i], bytes);
        std::memcpy(tensor.tensors[i], before, bytes);
        continue;
      }
      const cuda::OnDevice guard(of_rank_[rank]);
      ok(cudaMemcpyAsync(tensor.tensors[i], before, bytes, cudaMemcpyDefault, stream),
         "cudaMemcpyAsync");
    }
  }
}

void GroupCase::read(const cuda::DeviceGroup& group, const Streams& streams) {
  for (CaseTensor& tensor : tensors_) {
    const std::size_t bytes = tensor.tensors.bytes();
    for (std::size_t i = 0; bytes > 0 && i < tensor.tensors.count(); ++i) {
      const int device = of_rank_[rank_of(i)];
      if (device == kHost) {
        model::host_reads(tensor.tensors[i], bytes);
        std::memcpy(tensor.after[i].data(), tensor.tensors[i], bytes);
        continue;
      }
      const cuda::OnDevice guard(device);
      ok(cudaMemcpyAsync(tensor.after[i].data(), tensor.tensors[i], bytes, cudaMemcpyDefault,
                         stream_of(group, streams, device)),
         "cudaMemcpyAsync");
    }
  }
}

void GroupCase::call(cuda::DeviceGroup& group, const Streams& streams) {
  fill(group, streams);
  group.run(collective_, streams);
  read(group, streams);
}

void GroupCase::check() const {
  for (const CaseTensor& tensor : tensors_) {
    const std::vector<const void*> before = tensor.tensors.before();
    const std::size_t num_ranks = of_rank_.size();
    const std::vector<const void*> sources(before.begin(),
                                           before.begin() + static_cast<std::ptrdiff_t>(num_ranks));
    const std::vector<std::byte> reduced =
        expected_reduction(tensor.dtype, collective_.fold, sources, tensor.numel,
                           collective_.algorithm == Algorithm::kRing);
    const std::size_t output = tensor.tensors.count() > num_ranks ? num_ranks : root_;
    constexpr const char* kNames[] = {"all_reduce", "reduce", "broadcast"};
    for (std::size_t i = 0; i < tensor.tensors.count(); ++i) {
      const bool is_reduced = kind_ == Kind::kAllReduce || (kind_ == Kind::kReduce && i == output);
      const void* copied = before[kind_ == Kind::kBroadcast ? root_ : i];
      check_same(tensor.dtype, tensor.after[i].data(), is_reduced ? reduced.data() : copied,
                 tensor.numel,
                 join(kNames[static_cast<int>(kind_)], " with root ", root_, ", ",
                      algorithm_name(collective_.algorithm), " ", op_name(collective_.fold.op),
                      ", tensor ", i, " of ", num_ranks, " ranks"));
    }
    tensor.tensors.check_canaries();
  }
}

}  // namespace pyringar::stress
