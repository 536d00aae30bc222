// fused: cuts all tensors of a call, laid end to end, into blocks that threads take one by one.
//
// Tests     tests/test_all_reduce.py, tests/cpp/stress.cpp

#include "cpu/fused.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "cpu/kernels.h"

namespace pyringar {

namespace {

// Bytes per rank of a block. Threads do not start together, so a small call is cut finely enough
// for the faster one to take more; a large one coarsely, since every block opens new streams.
constexpr std::size_t kMinBlockBytes = 8 * 1024;
constexpr std::size_t kBlocksPerThread = 8;
// Below this much traffic a helper costs more to wake than it saves.
constexpr std::size_t kAloneBytes = 512 * 1024;
// The same for one that sleeps: between the steps of a training run all do.
constexpr std::size_t kAloneWhenColdBytes = 8 * 1024 * 1024;
constexpr int kMaxRanksOnStack = 16;
constexpr std::size_t kLineBytes = 64;

void call_kernel(const Kernels& kernels, const Buffers& tensor, int divisor, Range range) {
  const std::size_t offset = range.begin * item_bytes(tensor.dtype);
  const auto run = [&](const void** sources, void** destinations) {
    for (int r = 0; r < tensor.num_sources; ++r) {
      sources[r] = static_cast<const char*>(tensor.sources[r]) + offset;
    }
    for (int r = 0; r < tensor.num_destinations; ++r) {
      destinations[r] = static_cast<char*>(tensor.destinations[r]) + offset;
    }
    kernels.fused(sources, tensor.num_sources, destinations, tensor.num_destinations, range.size(),
                  divisor);
  };
  const int most = std::max(tensor.num_sources, tensor.num_destinations);
  if (most <= kMaxRanksOnStack) {
    const void* sources[kMaxRanksOnStack];
    void* destinations[kMaxRanksOnStack];
    run(sources, destinations);
  } else {
    std::vector<const void*> sources(static_cast<std::size_t>(tensor.num_sources));
    std::vector<void*> destinations(static_cast<std::size_t>(tensor.num_destinations));
    run(sources.data(), destinations.data());
  }
}

// All tensors of a call as one line of bytes (of one rank), cut into blocks. Each begins at a whole
// cache line, so that blocks do: vectors that straddle lines cost a small call a tenth of its time.
class BlockList {
 public:
  BlockList(std::span<const Buffers> tensors, Fold fold, int num_threads)
      : tensors_(tensors), fold_(fold) {
    ends_.reserve(tensors.size());
    for (const Buffers& tensor : tensors) {
      total_bytes_ += padded_bytes(tensor);
      ends_.push_back(total_bytes_);
    }
    const std::size_t even =
        total_bytes_ / (kBlocksPerThread * static_cast<std::size_t>(num_threads));
    // A multiple of a cache line, so that two threads do not write to one.
    block_bytes_ = std::clamp(even, kMinBlockBytes, kMaxBlockBytes) / kLineBytes * kLineBytes;
  }

  std::size_t num_blocks() const { return (total_bytes_ + block_bytes_ - 1) / block_bytes_; }

  // The caller takes blocks from the front, helpers from the back, until they meet: a buffer that
  // is reduced again and again then finds most of itself in the caches where it was left.
  void take_blocks(bool from_front) {
    std::size_t front = 0;
    while (taken_.fetch_add(1, std::memory_order_relaxed) < num_blocks()) {
      const std::size_t block =
          from_front ? front++ : num_blocks() - 1 - back_.fetch_add(1, std::memory_order_relaxed);
      const std::size_t begin = block * block_bytes_;
      run_bytes(begin, std::min(begin + block_bytes_, total_bytes_));
    }
  }

 private:
  static std::size_t padded_bytes(const Buffers& tensor) {
    const std::size_t bytes = tensor.numel * item_bytes(tensor.dtype);
    return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
  }

  void run_bytes(std::size_t begin, std::size_t end) const {
    std::size_t i = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), begin) -
                                             ends_.begin());
    for (; begin < end; ++i) {
      const Buffers& tensor = tensors_[i];
      const std::size_t item = item_bytes(tensor.dtype);
      const std::size_t start = ends_[i] - padded_bytes(tensor);
      const std::size_t stop = std::min(end, ends_[i]);
      const Range range = {(begin - start) / item, std::min((stop - start) / item, tensor.numel)};
      fuse_range(tensor, fold_, range);
      begin = stop;
    }
  }

  std::span<const Buffers> tensors_;
  const Fold fold_;
  std::vector<std::size_t> ends_;
  std::size_t total_bytes_ = 0;
  std::size_t block_bytes_ = 0;
  alignas(64) std::atomic<std::size_t> taken_{0};
  std::atomic<std::size_t> back_{0};
};

}  // namespace

void fuse_range(const Buffers& tensor, Fold fold, Range range) {
  if (range.size() > 0) call_kernel(kernels(tensor.dtype, fold.op), tensor, fold.divisor, range);
}

void run_fused(std::span<const Buffers> tensors, Fold fold, ThreadPool& pool) {
  std::size_t traffic_bytes = 0;
  for (const Buffers& tensor : tensors) traffic_bytes += tensor.traffic_bytes();
  const int num_helpers = traffic_bytes < kAloneBytes ? 0 : pool.look_for_helpers();
  if (num_helpers == 0 || (traffic_bytes < kAloneWhenColdBytes && pool.is_cold())) {
    for (const Buffers& tensor : tensors) {
      fuse_range(tensor, fold, {0, tensor.numel});
    }
    return;
  }
  BlockList blocks(tensors, fold, 1 + num_helpers);
  const std::thread::id caller = std::this_thread::get_id();
  pool.run([&] { blocks.take_blocks(std::this_thread::get_id() == caller); },
           blocks.num_blocks() - 1);
}

}  // namespace pyringar
