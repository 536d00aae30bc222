// fused_kernel_test: the fused and tree kernels over many tensors, against the oracle.
//
// Contract  fused-all: every dtype, reduction and order, with fewer and more sources than a group,
//           aligned and unaligned. fused-mean: divisors up to the largest table, hard values.
#include "cuda/fused.cuh"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <optional>

#include "emulated_kernels.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

using cuda::KernelKind;
using cuda::LargeTable;
using cuda::SmallTable;
using cuda::TableBuilder;

enum class Outputs { kFresh, kInputs, kSomeInputs };

struct FusedCall {
  DType dtype;
  Fold fold;
  int num_sources;
  int num_destinations;
  Outputs outputs;
  std::optional<Addresses> addresses = {};  // addresses of all tensors; absent: random
};

// One tensor of all ranks: sources, destinations, expected results.
class FusedPart {
 public:
  FusedPart(Random& random, const FusedCall& call, std::size_t numel)
      : call_(call),
        numel_(numel),
        inputs_(random, call.dtype, static_cast<std::size_t>(call.num_sources), numel,
                addresses(random)),
        fresh_(
            random, call.dtype,
            call.outputs == Outputs::kFresh ? static_cast<std::size_t>(call.num_destinations) : 0,
            numel, addresses(random)) {
    // The destinations are some of the inputs, in reverse order.
    for (int i = 0; call.outputs == Outputs::kSomeInputs && i < call.num_destinations; ++i) {
      some_.push_back(inputs_[static_cast<std::size_t>(call.num_sources - 1 - i)]);
    }
  }

  template <typename T>
  bool add_to(TableBuilder<T>& builder) const {
    return builder.add(inputs_.pointers(), destinations(), numel_);
  }

  void set_inputs(const void* contents) {
    for (std::size_t i = 0; i < inputs_.count(); ++i) inputs_.set(i, contents);
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
  Addresses addresses(Random& random) const {
    return call_.addresses ? *call_.addresses : random_addresses(random);
  }

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
               const std::vector<std::size_t>& sizes, const void* contents = nullptr) {
  const std::size_t item = item_bytes(call.dtype);
  auto table = std::make_unique<T>();
  TableBuilder<T> builder(*table, item, call.num_sources, call.num_destinations, call.fold.divisor);
  std::deque<FusedPart> parts;
  for (const std::size_t numel : sizes) {
    parts.emplace_back(random, call, numel);
    if (contents != nullptr) parts.back().set_inputs(contents);
    if (parts.back().add_to(builder)) continue;
    parts.pop_back();
    break;
  }
  const auto kernel = kernel_of<T>(call.dtype, call.fold, kind);
  const auto num_blocks = static_cast<unsigned>(random.between(1, 5));
  emulator::run_sequentially({num_blocks, cuda::kThreads, [&] { kernel(*table); }});
  for (const FusedPart& part : parts) part.check();
}

void run_fused(Random& random, const FusedCall& call, const std::vector<std::size_t>& sizes) {
  const int pointers = call.num_sources + call.num_destinations;
  if (pointers <= SmallTable::kMaxPointers && random.one_in(2)) {
    run_fused<SmallTable>(random, call, KernelKind::kFusedSmall, sizes);
  } else {
    run_fused<LargeTable>(random, call, KernelKind::kFusedLarge, sizes);
  }
}

Fold any_fold(Random& random, ReduceOp op, int k) {
  Fold fold = Fold::of({op, random.one_in(2) ? Order::kTree : Order::kRank}, k);
  if (op == ReduceOp::kMean && random.one_in(4)) fold.divisor = random.between(2, 100);
  return fold;
}

// Test sizes around tiles and around batches of single elements, with one and several tensors.
void run_all_outputs(Random& random, DType dtype, Fold fold, int k) {
  const std::size_t tile = cuda::tile_elems(item_bytes(dtype));
  const std::size_t batch = std::min<std::size_t>(tile, 4 * cuda::kThreads);
  const std::size_t few = random.below(40);
  run_fused(random, {dtype, fold, k, k, Outputs::kInputs, Addresses::kAligned},
            {0, 1, tile - 1, few});
  run_fused(random, {dtype, fold, k, k, Outputs::kInputs, Addresses::kAlike}, {40 + few});
  run_fused(random, {dtype, fold, k, k, Outputs::kInputs, Addresses::kApart}, {batch - 1, few});
  for (const Addresses addresses : {Addresses::kAligned, Addresses::kApart}) {
    run_fused(random, {dtype, fold, k, 1, Outputs::kFresh, addresses}, {tile + few});
  }
  run_fused(random, {dtype, fold, k, k, Outputs::kFresh}, {few, 1});
  run_fused(random, {dtype, fold, k, 1, Outputs::kSomeInputs}, {few, 0, 7});
  run_fused(random, {dtype, fold, 1, k, Outputs::kFresh}, {tile + few, 1});
}

template <typename T>
T from_bits(std::uint64_t bits) {
  T x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Add fp32 zeros, denormals (with ties), barely normal quotients, the largest numbers, NaN, ties.
void add_hard_floats(Random& random, int divisor, std::vector<float>& values) {
  const auto around = [&](float middle, std::uint32_t radius) {
    std::uint32_t bits;
    std::memcpy(&bits, &middle, sizeof bits);
    for (std::uint32_t b = bits - std::min(bits, radius); b <= bits + radius; ++b) {
      values.push_back(from_bits<float>(b));
      values.push_back(from_bits<float>(b | 0x80000000u));
    }
  };
  const auto real = static_cast<float>(divisor);
  around(0, 3000);
  around(real * std::numeric_limits<float>::min(), 500);
  around(std::numeric_limits<float>::max(), 500);  // includes infinities and NaN
  for (int i = 0; i < 1000; ++i) {
    const double tie =
        0x1p24 + 2.0 * static_cast<double>(random.below(1 << 23)) + 1;  // 25 bits; fp32 has 24
    around(static_cast<float>(tie * divisor), 1);
    values.push_back(from_bits<float>(random.bits()));
  }
}

// Return all values of 8 and 16 bits, hard values of fp32, edges and random bits of other dtypes.
template <typename T>
std::vector<T> hard_values(Random& random, int divisor) {
  std::vector<T> values;
  if constexpr (std::is_same_v<T, float>) {
    add_hard_floats(random, divisor, values);
  } else if constexpr (sizeof(T) <= 2) {
    for (std::uint64_t bits = 0; bits < 1u << (8 * sizeof(T)); ++bits) {
      values.push_back(from_bits<T>(bits));
    }
  } else {
    constexpr std::uint64_t kSign = std::uint64_t{1} << (8 * sizeof(T) - 1);
    for (std::uint64_t i = 0; i < 1000; ++i) {
      for (const std::uint64_t bits : {i, ~i, kSign + i, kSign - i, random.bits()}) {
        values.push_back(from_bits<T>(bits));
      }
    }
  }
  return values;
}

template <typename T>
void check_mean(Random& random, DType dtype, int divisor) {
  const std::vector<T> values = hard_values<T>(random, divisor);
  for (const Addresses addresses : {Addresses::kAligned, Addresses::kApart}) {
    const Fold fold{ReduceOp::kMean, divisor, random.one_in(2) ? Order::kTree : Order::kRank};
    const FusedCall call{dtype, fold, 1, 1, Outputs::kFresh, addresses};
    run_fused<SmallTable>(random, call, KernelKind::kFusedSmall, {values.size()}, values.data());
  }
}

void fused_dtype(Random& random, DType dtype) {
  for (const ReduceOp op : kAllOps) {
    for (const int k : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 16, 17, 33}) {
      Fold fold = any_fold(random, op, k);
      run_all_outputs(random, dtype, fold, k);
      if (!is_float(dtype) || op == ReduceOp::kMax || op == ReduceOp::kMin) continue;
      fold.order = fold.order == Order::kRank ? Order::kTree : Order::kRank;
      run_all_outputs(random, dtype, fold, k);
    }
    for (const int k : {100, LargeTable::kMaxPointers}) {
      const FusedCall call{dtype, any_fold(random, op, k), k, k, Outputs::kInputs};
      run_fused(random, call, {40 + random.below(40)});
    }
  }
}

void fused_all_round(Random& random) {
  for (const DType dtype : kAllDTypes) fused_dtype(random, dtype);
}

void fused_mean_round(Random& random) {
  // With 98 and 246 the product with the reciprocal is wrong at ties, and must be corrected.
  for (const int divisor : {2, 3, 5, 6, 7, 9, 11, 98, 100, 127, 128, 129, 246, 255, 256, 257,
                            LargeTable::kMaxPointers}) {
    check_mean<double>(random, DType::kFloat64, divisor);
    check_mean<float>(random, DType::kFloat32, divisor);
    check_mean<Float16>(random, DType::kFloat16, divisor);
    check_mean<BFloat16>(random, DType::kBFloat16, divisor);
    check_mean<std::int8_t>(random, DType::kInt8, divisor);
    check_mean<std::uint8_t>(random, DType::kUInt8, divisor);
    check_mean<std::int32_t>(random, DType::kInt32, divisor);
    check_mean<std::int64_t>(random, DType::kInt64, divisor);
  }
}

const Part kFusedAll("fused-all", &fused_all_round, kOnce);
const Part kFusedMean("fused-mean", &fused_mean_round, kOnce);

}  // namespace

}  // namespace pyringar::stress
