// direct_test: a call over several devices, each of which folds its slice of every tensor, reading
// and writing all of them.

#include <deque>
#include <vector>

#include "cuda/tables.h"
#include "emulated.h"
#include "launches.h"
#include "own_tests.h"

namespace pyringar::ptx {

namespace {

void run_direct(stress::Random& random, int k, std::size_t num_devices, DType dtype, Fold fold,
                const std::vector<std::size_t>& sizes) {
  std::deque<stress::Tensors> tensors;
  std::vector<Buffers> buffers;
  for (const std::size_t numel : sizes) {
    const stress::Tensors& made = tensors.emplace_back(random, dtype, static_cast<std::size_t>(k),
                                                       numel, stress::random_addresses(random));
    buffers.push_back({made.pointers(), made.pointers(), k, k, numel, dtype});
  }
  cuda::launch_tables({buffers, fold, "direct"}, num_devices,
                      [&]<typename T>(DType of, const T* tables) {
                        const auto kernel = stress::kernel_of<T>(of, fold, cuda::kFusedWith<T>);
                        for (std::size_t d = 0; d < num_devices; ++d) {
                          if (!cuda::has_elements(tables[d])) continue;
                          const auto most = static_cast<std::uint32_t>(random.between(1, 6));
                          enqueue(d, {std::min(most, tables[d].num_tiles), cuda::kThreads,
                                      [&, d] { kernel(tables[d]); }, static_cast<int>(d)});
                        }
                      });
  run_enqueued();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    std::vector<std::byte> expected(tensors[i].bytes());
    stress::fold_elements(dtype, fold, tensors[i].before(), {0, buffers[i].numel}, expected.data());
    for (int rank = 0; rank < k; ++rank) {
      stress::check_same(dtype, tensors[i][static_cast<std::size_t>(rank)], expected.data(),
                         buffers[i].numel, join("direct of ", k, ", rank ", rank));
    }
    tensors[i].check_canaries();
  }
}

Fold some_fold(stress::Random& random, ReduceOp op, int k) {
  return Fold::of({op, random.one_in(2) ? Order::kTree : Order::kRank}, k);
}

}  // namespace

void direct_round(stress::Random& random) {
  const int k = random.between(2, 4);
  std::vector<std::size_t> sizes;
  for (int i = random.between(1, 5); i > 0; --i) {
    sizes.push_back(stress::random_numel(random, 20'000));
  }
  run_direct(random, k, static_cast<std::size_t>(random.between(1, 3)),
             stress::random_dtype(random), some_fold(random, stress::random_op(random), k), sizes);
}

// Around the borders of vectors, of slices, and of a tile on every device.
void direct_all_round(stress::Random& random) {
  for (const DType dtype : stress::kAllDTypes) {
    for (const ReduceOp op : stress::kAllOps) {
      for (const int k : {2, 3, 4}) {
        for (const std::size_t num_devices : {1, 2}) {
          std::vector<std::size_t> sizes;
          for (const std::size_t border : {16 / item_bytes(dtype), num_devices * cuda::kSliceElems,
                                           num_devices * cuda::tile_elems(item_bytes(dtype))}) {
            sizes.push_back(border - 1 + random.below(3));
          }
          run_direct(random, k, num_devices, dtype, some_fold(random, op, k), sizes);
        }
      }
    }
  }
}

}  // namespace pyringar::ptx
