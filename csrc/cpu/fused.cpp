// fused: cuts all tensors of a call, laid end to end, into blocks that threads take.
#include "cpu/fused.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "core/error.h"
#include "cpu/kernels.h"

namespace pyringar {

namespace {

// Smallest block, in bytes per rank. Small blocks balance threads that start at different times.
// Large calls get larger blocks, since each block starts new prefetch streams.
constexpr std::size_t kMinBlockBytes = 8 * 1024;
constexpr std::size_t kBlocksPerThread = 8;
// Calls with less traffic run on the caller's thread: waking a helper costs more than it saves.
constexpr std::size_t kAloneBytes = 512 * 1024;
// The same limit if the helper threads sleep, as they do between training steps.
constexpr std::size_t kAloneWhenColdBytes = 8 * 1024 * 1024;
constexpr int kMaxRanksOnStack = 16;
constexpr std::size_t kLineBytes = 64;

void fuse_range(const Buffers& tensor, Fold fold, Range range) {
  if (range.size() == 0) return;
  const FusedKernel kernel = fused_kernel(tensor.dtype, fold);
  const std::size_t offset = range.begin * item_bytes(tensor.dtype);
  const auto run = [&](const void** sources, void** destinations) {
    for (int r = 0; r < tensor.num_sources; ++r) {
      sources[r] = static_cast<const char*>(tensor.sources[r]) + offset;
    }
    for (int r = 0; r < tensor.num_destinations; ++r) {
      destinations[r] = static_cast<char*>(tensor.destinations[r]) + offset;
    }
    kernel(sources, tensor.num_sources, destinations, tensor.num_destinations, range.size(),
           fold.divisor);
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

// The tensors of a call, laid end to end and cut into blocks, with a queue of blocks per thread.
// Blocks begin at cache lines: vectors that cross a line make the loop a tenth slower.
class BlockList {
 public:
  BlockList(std::span<const Buffers> tensors, Fold fold, int num_threads)
      : tensors_(tensors), fold_(fold) {
    ends_.reserve(tensors.size());
    for (const Buffers& tensor : tensors) {
      total_bytes_ += padded_bytes(tensor);
      ends_.push_back(total_bytes_);
    }
    const auto max_queues = static_cast<std::size_t>(num_threads);
    const std::size_t even = total_bytes_ / (kBlocksPerThread * max_queues);
    block_bytes_ = std::clamp(even, kMinBlockBytes, kMaxBlockBytes) / kLineBytes * kLineBytes;
    num_blocks_ = (total_bytes_ + block_bytes_ - 1) / block_bytes_;
    queues_ = std::vector<BlockQueue>(std::min(max_queues, num_blocks_));
  }

  std::size_t num_blocks() const { return num_blocks_; }

  // Run the blocks of the thread's own queue from the front, so that a repeated call finds them in
  // this core's cache. Then run queues that no thread has started, from the back.
  void take_blocks(int thread) {
    const auto own = static_cast<std::size_t>(thread);
    for (std::size_t i = 0; i < queues_.size(); ++i) {
      const std::size_t at = (own + i) % queues_.size();
      BlockQueue& queue = queues_[at];
      if (at != own && queue.taken.load(std::memory_order_relaxed) > 0) continue;
      const std::size_t begin = num_blocks_ * at / queues_.size();
      const std::size_t end = num_blocks_ * (at + 1) / queues_.size();
      run_queue(queue, begin, end, at == own);
    }
  }

 private:
  struct alignas(kLineBytes) BlockQueue {
    std::atomic<std::size_t> taken{0};
    std::atomic<std::size_t> from_back{0};
  };

  void run_queue(BlockQueue& queue, std::size_t begin, std::size_t end, bool is_own) const {
    std::size_t front = begin;
    while (queue.taken.fetch_add(1, std::memory_order_relaxed) < end - begin) {
      const std::size_t block =
          is_own ? front++ : end - 1 - queue.from_back.fetch_add(1, std::memory_order_relaxed);
      const std::size_t first = block * block_bytes_;
      run_bytes(first, std::min(first + block_bytes_, total_bytes_));
    }
  }

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
  std::size_t num_blocks_ = 0;
  std::vector<BlockQueue> queues_;
};

std::size_t traffic_bytes_of(std::span<const Buffers> tensors) {
  std::size_t bytes = 0;
  for (const Buffers& tensor : tensors) bytes += tensor.traffic_bytes();
  return bytes;
}

// A blocking call uses at most as many threads as a torch operation; a background call any number.
int most_threads(std::size_t traffic_bytes, CallMode mode) {
  if (traffic_bytes < kAloneBytes) return 1;
  const int in_torch = mode == CallMode::kBackground ? 0 : torch_team::num_threads();
  return in_torch == 0 ? std::numeric_limits<int>::max() : in_torch;
}

void fuse_alone(std::span<const Buffers> tensors, Fold fold) {
  for (const Buffers& tensor : tensors) fuse_range(tensor, fold, {0, tensor.numel});
}

}  // namespace

void run_fused(std::span<const Buffers> tensors, Fold fold, ThreadPool& pool, CallMode mode) {
  const std::size_t traffic_bytes = traffic_bytes_of(tensors);
  const int most = most_threads(traffic_bytes, mode);
  if (most == 1) return fuse_alone(tensors, fold);
  const bool may_join = mode == CallMode::kBlocking && torch_team::is_ready();
  if (may_join) {
    BlockList blocks(tensors, fold, most);
    if (torch_team::try_run([&](int thread, int) { blocks.take_blocks(thread); })) return;
  }
  const int num_helpers = std::min(pool.count_helpers(), most - 1);
  const bool is_small = traffic_bytes < kAloneWhenColdBytes;
  if (num_helpers == 0 || (is_small && pool.is_cold())) return fuse_alone(tensors, fold);
  BlockList blocks(tensors, fold, 1 + num_helpers);
  pool.run([&](int thread) { blocks.take_blocks(thread); },
           std::min(static_cast<std::size_t>(num_helpers), blocks.num_blocks() - 1));
}

bool is_best_done_at_once(std::span<const Buffers> tensors) {
  const std::size_t traffic_bytes = traffic_bytes_of(tensors);
  return traffic_bytes < kAloneBytes ||
         (traffic_bytes < kAloneWhenColdBytes && torch_team::is_ready());
}

}  // namespace pyringar
