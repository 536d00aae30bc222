// cases: see the header.

#include "cases.h"

#include <algorithm>
#include <cstring>

#include "cuda/peers.h"

namespace pyringar::cuda {

bool enable_peers(int a, int b) { return a == b || model::enable_peers(a, b); }
bool is_peer_visible(const void*) {
  ++stress::num_asked;
  return model::peers.tensors_are_visible;
}

}  // namespace pyringar::cuda

namespace pyringar::stress {

cudaStream_t make_stream(int device) {
  const cuda::OnDevice guard(device);
  cudaStream_t stream = nullptr;
  ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return stream;
}

std::vector<cudaStream_t> make_streams(Random& random, const cuda::Group& group) {
  std::vector<cudaStream_t> streams;
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

cudaStream_t stream_of(const cuda::Group& group, const std::vector<cudaStream_t>& streams,
                       int device) {
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
  collective_.pointers.reserve(num_parts * num_ranks);
  for (std::size_t p = 0; p < num_parts; ++p) {
    const std::size_t numel = is_large   ? 40'000
                              : has_many ? random.below(20)
                                         : edges[random.below(9)];
    const DType dtype = has_many ? dtype_of_many : random_dtype(random);
    parts_.push_back(
        {dtype, numel, Tensors(random, dtype, num_ranks, numel, random_addresses(random)), {}});
    Part& part = parts_.back();
    void* const* table = collective_.pointers.data() + collective_.pointers.size();
    collective_.tensors.push_back({table, table, k, k, numel, dtype});
    for (int rank = 0; rank < k; ++rank) {
      void* tensor = part.tensors[static_cast<std::size_t>(rank)];
      part.after.emplace_back(part.tensors.bytes());
      collective_.pointers.push_back(tensor);
      collective_.ranks.push_back(rank);
      model::show_tensor(tensor, part.tensors.bytes(), of_rank_[static_cast<std::size_t>(rank)]);
    }
  }
}

Case::~Case() {
  for (const Part& part : parts_) {
    for (std::size_t rank = 0; rank < part.tensors.count(); ++rank) {
      model::hide_tensor(part.tensors[rank]);
    }
  }
}

void Case::fill(const cuda::Group& group, const std::vector<cudaStream_t>& streams) {
  for (std::size_t rank = 0; rank < of_rank_.size(); ++rank) {
    fill_rank(rank, stream_of(group, streams, of_rank_[rank]));
  }
}

void Case::fill_rank(std::size_t rank, cudaStream_t stream) {
  for (Part& part : parts_) {
    const void* before = part.tensors.before()[rank];
    const std::size_t bytes = part.tensors.bytes();
    if (bytes == 0) continue;
    if (of_rank_[rank] == kHost) {
      model::host_writes(part.tensors[rank], bytes);
      std::memcpy(part.tensors[rank], before, bytes);
      continue;
    }
    const cuda::OnDevice guard(of_rank_[rank]);
    ok(cudaMemcpyAsync(part.tensors[rank], before, bytes, cudaMemcpyDefault, stream),
       "cudaMemcpyAsync");
  }
}

void Case::read(const cuda::Group& group, const std::vector<cudaStream_t>& streams) {
  for (Part& part : parts_) {
    for (std::size_t rank = 0; rank < of_rank_.size(); ++rank) {
      const std::size_t bytes = part.tensors.bytes();
      if (bytes == 0) continue;
      if (of_rank_[rank] == kHost) {
        model::host_reads(part.tensors[rank], bytes);
        std::memcpy(part.after[rank].data(), part.tensors[rank], bytes);
        continue;
      }
      const cuda::OnDevice guard(of_rank_[rank]);
      ok(cudaMemcpyAsync(part.after[rank].data(), part.tensors[rank], bytes, cudaMemcpyDefault,
                         stream_of(group, streams, of_rank_[rank])),
         "cudaMemcpyAsync");
    }
  }
}

void Case::check() const {
  for (const Part& part : parts_) {
    const std::vector<std::byte> expected =
        expected_reduction(part.dtype, collective_.fold, part.tensors.before(), part.numel,
                           collective_.algorithm == Algorithm::kRing);
    for (std::size_t rank = 0; rank < part.tensors.count(); ++rank) {
      check_same(part.dtype, part.after[rank].data(), expected.data(), part.numel,
                 join(algorithm_name(collective_.algorithm), " ", op_name(collective_.fold.op),
                      ", rank ", rank, " of ", part.tensors.count()));
    }
    part.tensors.check_canaries();
  }
}

}  // namespace pyringar::stress
