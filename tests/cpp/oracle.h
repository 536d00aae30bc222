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

// Folds elements [range) of all sources into expected[range).
void fold_elements(DType dtype, const Fold& fold, const std::vector<const void*>& sources,
                   Range range, void* expected);

void check_same(DType dtype, const void* got, const void* expected, std::size_t n,
                const std::string& what);

// Where tensors lie: on cache lines; at any element's address, as torch's views do, all alike, or
// the first two apart modulo 16 bytes; at any byte's.
enum class Addresses { kAligned, kAlike, kApart, kAnyByte };
Addresses random_addresses(Random& random);  // of an element

// Tensors of one size with random contents, and what they held before; canaries before them, and
// behind every other one. One for each rank, where it is about ranks.
class Tensors {
 public:
  Tensors(Random& random, DType dtype, std::size_t count, std::size_t numel,
          Addresses addresses = Addresses::kAnyByte);

  void* const* pointers() const { return pointers_.data(); }
  void* operator[](std::size_t i) const { return pointers_[i]; }
  std::size_t count() const { return pointers_.size(); }
  std::size_t numel() const { return numel_; }
  DType dtype() const { return dtype_; }
  std::size_t bytes() const { return numel_ * item_bytes(dtype_); }
  std::vector<const void*> before() const;
  // Replaces the contents of tensor i, and what it held before.
  void set(std::size_t i, const void* contents);
  Buffers buffers() const;  // reduced in place

  void check_canaries() const;
  void check_unchanged() const;
  // All hold the reduction of what they held before: in the fold's order, or the ring's.
  void check_all_reduced(Fold fold, bool in_ring_order, const char* what) const;

 private:
  DType dtype_;
  std::size_t numel_;
  std::vector<Guarded> memory_;
  std::vector<void*> pointers_;
  std::vector<std::vector<std::byte>> before_;
};

// Elements of the whole reduction, in the order the algorithm promises.
std::vector<std::byte> expected_reduction(DType dtype, const Fold& fold,
                                          const std::vector<const void*>& sources,
                                          std::size_t numel, bool in_ring_order);

// One collective of a ring, of one phase: each rank's input and output, and what those must hold.
class RingTensors {
 public:
  // at: where each tensor lies.
  RingTensors(Random& random, const Fold& fold, const Buffers& shape, bool in_place,
              Addresses (*at)(Random& random));

  const Fold& fold() const { return fold_; }
  std::size_t numel() const { return shape_.numel; }
  DType dtype() const { return shape_.dtype; }
  RingPhases phases() const { return shape_.phases; }
  void* input(int rank) const { return inputs_[static_cast<std::size_t>(rank)][0]; }
  void* output(int rank) const {
    return (in_place_ ? inputs_ : outputs_)[static_cast<std::size_t>(rank)][0];
  }
  void check() const;

 private:
  std::vector<std::byte> expected() const;

  Fold fold_;
  Buffers shape_;  // no pointers
  bool in_place_;
  std::vector<Tensors> inputs_;
  std::vector<Tensors> outputs_;
};

}  // namespace pyringar::stress
