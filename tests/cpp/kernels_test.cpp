// kernels_test: every loop of every dtype and reduction against a plain one, with odd sizes,
// odd addresses, and destinations that are sources.

#include "cpu/kernels.h"

#include "oracle.h"
#include "parts.h"

namespace pyringar::stress {

namespace {

std::vector<Guarded> random_buffers(Random& random, DType dtype, int count, std::size_t n) {
  std::vector<Guarded> buffers;
  for (int i = 0; i < count; ++i) {
    buffers.emplace_back(random, n * item_bytes(dtype));
    fill(random, dtype, buffers.back().data(), n);
  }
  return buffers;
}

void check_canaries(const std::vector<Guarded>& buffers) {
  for (const Guarded& buffer : buffers) buffer.check_canaries();
}

std::vector<std::byte> copy_of(const Guarded& buffer) {
  return {buffer.data(), buffer.data() + buffer.size()};
}

void check_fused(Random& random, DType dtype, Fold fold, std::size_t n) {
  const int num_sources = random.between(1, 20);
  const int num_destinations = random.between(1, 20);
  if (fold.op == ReduceOp::kMean) fold.divisor = random.between(1, 300);
  const std::vector<Guarded> inputs = random_buffers(random, dtype, num_sources, n);
  const std::vector<Guarded> spare = random_buffers(random, dtype, num_destinations, n);
  std::vector<const void*> sources;
  std::vector<std::vector<std::byte>> before;
  for (const Guarded& input : inputs) {
    sources.push_back(input.data());
    before.push_back(copy_of(input));
  }
  // Each source at most once among the destinations, elsewhere memory of its own.
  std::vector<void*> destinations;
  std::vector<bool> written(static_cast<std::size_t>(num_sources), false);
  for (int d = 0; d < num_destinations; ++d) {
    const std::size_t s = random.below(static_cast<std::size_t>(num_sources));
    const bool in_place = !written[s] && random.one_in(2);
    if (in_place) written[s] = true;
    destinations.push_back(in_place ? inputs[s].data() : spare[static_cast<std::size_t>(d)].data());
  }

  std::vector<std::byte> expected(n * item_bytes(dtype));
  fold_elements(dtype, fold, sources, {0, n}, expected.data());
  fused_kernel(dtype, fold)(sources.data(), num_sources, destinations.data(), num_destinations, n,
                            fold.divisor);
  for (const void* destination : destinations) {
    check_same(dtype, destination, expected.data(), n,
               join("fused ", op_name(fold.op), " of ", num_sources, " sources in ",
                    order_name(fold.order), " order"));
  }
  for (std::size_t s = 0; s < inputs.size(); ++s) {
    CHECK(written[s] || copy_of(inputs[s]) == before[s], "source ", s, " was written");
  }
  check_canaries(inputs);
  check_canaries(spare);
}

void check_widen(Random& random, DType dtype, std::size_t n) {
  const std::vector<Guarded> own = random_buffers(random, dtype, 1, n);
  const std::vector<Guarded> out = random_buffers(random, partial_dtype(dtype), 1, n);
  std::vector<std::byte> expected(n * partial_bytes(dtype));
  widen_elements(dtype, own[0].data(), expected.data(), n);
  kernels(dtype, ReduceOp::kSum).widen(own[0].data(), out[0].data(), n);
  check_same(partial_dtype(dtype), out[0].data(), expected.data(), n, "widen");
  check_canaries(own);
  check_canaries(out);
}

void check_accumulate(Random& random, DType dtype, ReduceOp op, std::size_t n) {
  const std::vector<Guarded> own = random_buffers(random, dtype, 1, n);
  const std::vector<Guarded> partials = random_buffers(random, partial_dtype(dtype), 2, n);
  std::vector<std::byte> expected(n * partial_bytes(dtype));
  accumulate_elements(dtype, op, partials[0].data(), own[0].data(), expected.data(), n);
  void* out = random.one_in(2) ? partials[0].data() : partials[1].data();
  kernels(dtype, op).accumulate(partials[0].data(), own[0].data(), out, n);
  check_same(partial_dtype(dtype), out, expected.data(), n, join("accumulate ", op_name(op)));
  check_canaries(own);
  check_canaries(partials);
}

void check_finish(Random& random, DType dtype, ReduceOp op, std::size_t n) {
  const int divisor = op == ReduceOp::kMean ? random.between(1, 300) : 1;
  const std::vector<Guarded> own = random_buffers(random, dtype, 1, n);
  const std::vector<Guarded> partial = random_buffers(random, partial_dtype(dtype), 1, n);
  const std::vector<Guarded> spare = random_buffers(random, dtype, 3, n);
  std::vector<std::byte> expected(n * item_bytes(dtype));
  finish_elements(dtype, op, divisor, partial[0].data(), own[0].data(), expected.data(), n);
  std::vector<void*> destinations;
  for (const Guarded& buffer : spare) destinations.push_back(buffer.data());
  if (random.one_in(2)) destinations[0] = own[0].data();
  const int num_destinations = random.between(1, 3);
  kernels(dtype, op).finish(partial[0].data(), own[0].data(), destinations.data(), num_destinations,
                            n, divisor);
  for (int d = 0; d < num_destinations; ++d) {
    check_same(dtype, destinations[static_cast<std::size_t>(d)], expected.data(), n,
               join("finish ", op_name(op)));
  }
  check_canaries(own);
  check_canaries(partial);
  check_canaries(spare);
}

}  // namespace

void kernels_round(Random& random) {
  for (const DType dtype : kAllDTypes) {
    check_widen(random, dtype, random_numel(random, 1500));
    for (const ReduceOp op : kAllOps) {
      for (int order = 0; order < kNumOrders; ++order) {
        const Fold fold{op, 1, static_cast<Order>(order)};
        if (has_order(op, fold.order)) check_fused(random, dtype, fold, random_numel(random, 1500));
      }
      check_accumulate(random, dtype, op, random_numel(random, 1500));
      check_finish(random, dtype, op, random_numel(random, 1500));
    }
  }
}

}  // namespace pyringar::stress
