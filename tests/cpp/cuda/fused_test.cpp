// fused_test: the fused kernel over many tensors at once, against the oracle, in both orders.

#include "cuda/fused.cuh"

#include <algorithm>

#include "emulated.h"
#include "launched.h"

namespace pyringar::stress {

namespace {

using cuda::KernelKind;
using cuda::TableBuilder;

enum class Outputs { kFresh, kInputs, kSomeInputs };

struct FusedCall {
  DType dtype;
  Fold fold;
  int num_sources;
  int num_destinations;
  Outputs outputs;
};

// One tensor over all ranks: sources, destinations, and what those must hold.
class FusedPart {
 public:
  FusedPart(Random& random, const FusedCall& call, std::size_t numel)
      : call_(call),
        numel_(numel),
        inputs_(random, call.dtype, static_cast<std::size_t>(call.num_sources), numel, any(random),
                "the input"),
        fresh_(
            random, call.dtype,
            call.outputs == Outputs::kFresh ? static_cast<std::size_t>(call.num_destinations) : 0,
            numel, any(random), "the output") {
    // Some inputs: a list of its own, in an order of its own.
    for (int i = 0; call.outputs == Outputs::kSomeInputs && i < call.num_destinations; ++i) {
      some_.push_back(inputs_[static_cast<std::size_t>(call.num_sources - 1 - i)]);
    }
  }

  template <typename T>
  bool add_to(TableBuilder<T>& builder) const {
    return builder.add(inputs_.pointers(), destinations(), numel_);
  }

  void check() const {
    std::vector<std::byte> expected(inputs_.bytes());
    const std::vector<const void*> sources = inputs_.before();
    fold_elements(call_.dtype, call_.fold, sources, {0, numel_}, expected.data());
    for (int i = 0; i < call_.num_destinations; ++i) {
      check_same(call_.dtype, destinations()[i], expected.data(), numel_,
                 join("fused ", op_name(call_.fold.op), " in ", order_name(call_.fold.order),
                      " order of ", call_.num_sources, ", output ", i));
    }
    inputs_.check_canaries();
    fresh_.check_canaries();
    if (call_.outputs == Outputs::kFresh) inputs_.check_unchanged();
  }

 private:
  static Addresses any(Random& random) { return random_addresses(random); }

  void* const* destinations() const {
    if (call_.outputs == Outputs::kFresh) return fresh_.pointers();
    return call_.outputs == Outputs::kInputs ? inputs_.pointers() : some_.data();
  }

  const FusedCall& call_;
  std::size_t numel_;
  Tensors inputs_;
  Tensors fresh_;
  std::vector<void*> some_;
};

template <typename T>
void run_fused(Random& random, const FusedCall& call, KernelKind kind,
               const std::vector<std::size_t>& sizes) {
  const std::size_t item = item_bytes(call.dtype);
  auto table = std::make_unique<T>();
  TableBuilder<T> builder(*table, item, call.num_sources, call.num_destinations, call.fold.divisor);
  std::deque<FusedPart> parts;
  for (const std::size_t numel : sizes) {
    parts.emplace_back(random, call, numel);
    if (parts.back().add_to(builder)) continue;
    parts.pop_back();
    break;
  }
  const auto kernel = kernel_of<T>(call.dtype, call.fold, kind);
  const auto num_blocks = static_cast<unsigned>(random.between(1, 5));
  emulator::run_in_turn({num_blocks, cuda::kThreads, [&] { kernel(*table); }});
  for (const FusedPart& part : parts) part.check();
}

void run_fused(Random& random, const FusedCall& call, const std::vector<std::size_t>& sizes) {
  with_table(static_cast<KernelKind>(random.below(3)), [&]<typename T>(std::type_identity<T>) {
    run_fused<T>(random, call, cuda::kFusedWith<T>, sizes);
  });
}

Fold any_fold(Random& random, ReduceOp op, int k) {
  Fold fold = Fold::of({op, random.one_in(2) ? Order::kTree : Order::kRank}, k);
  if (op == ReduceOp::kMean && random.one_in(4)) fold.divisor = random.between(2, 100);
  return fold;
}

}  // namespace

void fused_all_round(Random& random) {
  for (const DType dtype : kAllDTypes) {
    const std::size_t tile = cuda::tile_elems(item_bytes(dtype));
    for (const ReduceOp op : kAllOps) {
      for (const int k : {1, 2, 3, 8, 17}) {
        const Fold fold = any_fold(random, op, k);
        const std::size_t few = random.below(40);
        run_fused(random, {dtype, fold, k, k, Outputs::kInputs}, {0, 1, tile - 1, few});
        run_fused(random, {dtype, fold, k, k, Outputs::kFresh}, {tile + 1, few, 2 * tile});
        run_fused(random, {dtype, fold, k, 1, Outputs::kSomeInputs}, {tile, few, 0, 7});
        run_fused(random, {dtype, fold, k, 1, Outputs::kFresh}, {3 * tile + few});
        run_fused(random, {dtype, fold, 1, k, Outputs::kFresh}, {few, tile + few, 1});
      }
    }
  }
}

void fused_round(Random& random) {
  const int k = random.one_in(4) ? random.between(1, 33) : random.between(1, 5);
  FusedCall call{};
  call.dtype = random_dtype(random);
  call.fold = any_fold(random, random_op(random), k);
  call.num_sources = k;
  call.outputs = static_cast<Outputs>(random.below(3));
  call.num_destinations = call.outputs == Outputs::kInputs ? k : random.between(1, k);
  std::vector<std::size_t> sizes;
  for (int i = random.between(1, 30); i > 0; --i) sizes.push_back(random_numel(random, 3000));
  run_fused(random, call, sizes);
}

}  // namespace pyringar::stress
