// oracle: the expected result of every reduction, computed one element at a time.
//
// Contract  Independent of the engine: 16-bit floats are converted through double arithmetic, and
//           folds are plain loops or the equations of core/fold.h. Exact sums use core/exact_sum.h.
//           Any two NaNs are equal. All other values are compared bit for bit.
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
// random_fold: any order that CPU engines have. random_gpu_fold: no exact sums.
Fold random_fold(Random& random, int world_size);
Fold random_gpu_fold(Random& random, int world_size);

// Fill with positions, random floats, random bits (with NaN and infinities), or edge values.
void fill(Random& random, DType dtype, void* to, std::size_t n);

// Fold elements [range) of all sources into expected[range).
void fold_elements(DType dtype, const Fold& fold, const std::vector<const void*>& sources,
                   Range range, void* expected);

void check_same(DType dtype, const void* got, const void* expected, std::size_t n,
                const std::string& what);

// Addresses of tensors: cache lines; equal element offsets; offsets where the first two differ
// modulo 16 bytes; any bytes.
enum class Addresses { kAligned, kAlike, kApart, kAnyByte };
Addresses random_addresses(Random& random);  // results are aligned to elements

// Tensors of equal size with random contents and a copy of them. Canaries are before each tensor
// and, in half the cases, behind it. Usually tensor i belongs to rank i.
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
  // Replace the contents of tensor i and the copy.
  void set(std::size_t i, const void* contents);
  Buffers buffers() const;  // for an in-place reduction

  void check_canaries() const;
  void check_unchanged() const;
  // Check that all tensors hold the reduction of the copies, in the fold's or the ring's order.
  void check_all_reduced(Fold fold, bool in_ring_order, const char* what) const;

 private:
  DType dtype_;
  std::size_t numel_;
  std::vector<Guarded> memory_;
  std::vector<void*> pointers_;
  std::vector<std::vector<std::byte>> before_;
};

// Return the whole reduction, in the order that the algorithm promises.
std::vector<std::byte> expected_reduction(DType dtype, const Fold& fold,
                                          const std::vector<const void*>& sources,
                                          std::size_t numel, bool in_ring_order);

// Inputs, outputs and expected results of one ring collective.
class RingTensors {
 public:
  // at: chooses the address of each tensor.
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
  Buffers shape_;  // sizes and dtype, without pointers
  bool in_place_;
  std::vector<Tensors> inputs_;
  std::vector<Tensors> outputs_;
};

}  // namespace pyringar::stress
