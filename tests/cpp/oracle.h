// oracle: what every reduction must give, one element at a time, by other means than the engine's.
//
// Contract  16-bit floats are widened and narrowed through double arithmetic with explicit quanta,
//           not with the bit tricks of core/half.h; folds are plain loops in the order they are
//           given, or the equations of core/fold.h as they stand; exact sums are
//           core/exact_sum.h's. Two NaNs are equal whatever their bits; all else is compared bit
//           for bit.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "check.h"
#include "core/collective.h"
#include "core/schedule.h"

namespace pyringar::stress {

double value_of(Float16 x);
double value_of(BFloat16 x);
Float16 nearest_float16(float value);
BFloat16 nearest_bfloat16(float value);

inline constexpr DType kAllDTypes[] = {DType::kFloat64,  DType::kFloat32, DType::kFloat16,
                                       DType::kBFloat16, DType::kInt8,    DType::kUInt8,
                                       DType::kInt32,    DType::kInt64};
inline constexpr ReduceOp kAllOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax,
                                       ReduceOp::kMin, ReduceOp::kProd};
DType random_dtype(Random& random);
ReduceOp random_op(Random& random);
// In any order that an engine on the host has, or, of one with GPUs, all but exact sums.
Fold random_fold(Random& random, int world_size);
Fold random_gpu_fold(Random& random, int world_size);

// Positions, random floats, random bits with NaN and infinities, or values at the edges of the
// type. One kind per call.
void fill(Random& random, DType dtype, void* to, std::size_t n);

std::vector<int> rank_order(int world_size);
std::vector<int> ring_order(int world_size, int chunk);

// Folds elements [range) of all sources into expected[range).
void fold_elements(DType dtype, const Fold& fold, const std::vector<const void*>& sources,
                   Range range, void* expected);
// The same of sources[order[0]], sources[order[1]], ..., from left to right.
void reduce_elements(DType dtype, ReduceOp op, int divisor, const void* const* sources,
                     const std::vector<int>& order, Range range, void* expected);

// The three stages of a ring, element by element.
void widen_elements(DType dtype, const void* own, void* partial, std::size_t n);
void accumulate_elements(DType dtype, ReduceOp op, const void* partial, const void* own, void* out,
                         std::size_t n);
void finish_elements(DType dtype, ReduceOp op, int divisor, const void* partial, const void* own,
                     void* out, std::size_t n);

void check_same(DType dtype, const void* got, const void* expected, std::size_t n,
                const std::string& what);
DType partial_dtype(DType dtype);

// One tensor per rank with random contents, and what they held before.
class RankTensors {
 public:
  RankTensors(Random& random, int world_size, DType dtype, std::size_t numel);

  void* const* pointers() const { return pointers_.data(); }
  const void* const* inputs() const { return const_pointers_.data(); }
  int world_size() const { return static_cast<int>(pointers_.size()); }
  // Reduced in place.
  Buffers buffers() const {
    return {inputs(), pointers(), world_size(), world_size(), numel_, dtype_};
  }
  std::size_t numel() const { return numel_; }
  DType dtype() const { return dtype_; }
  std::size_t bytes() const { return numel_ * item_bytes(dtype_); }
  const void* before(int rank) const { return before_[static_cast<std::size_t>(rank)].data(); }

  // What is there now counts as the input of the next collective.
  void remember();
  void check_unchanged() const;
  // Every rank holds the reduction of what all held before: in the fold's order, or the ring's.
  void check_all_reduced(Fold fold, bool in_ring_order, const char* what) const;

 private:
  DType dtype_;
  std::size_t numel_;
  std::vector<Guarded> tensors_;
  std::vector<void*> pointers_;
  std::vector<const void*> const_pointers_;
  std::vector<std::vector<std::byte>> before_;
};

// Elements of the whole reduction, in the order the algorithm promises.
std::vector<std::byte> expected_reduction(DType dtype, const Fold& fold,
                                          const std::vector<const void*>& sources,
                                          std::size_t numel, bool in_ring_order);

}  // namespace pyringar::stress
