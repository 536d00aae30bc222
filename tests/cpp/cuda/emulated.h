// emulated: what the tests of emulated kernels share: tensors at chosen addresses, kernels by type.
//
// Contract  A round leaves no thread behind and needs no other round before it.
#pragma once

#include <deque>
#include <vector>

#include "core/fold.h"
#include "cuda/kernels.h"
#include "cuda_emulator.h"
#include "oracle.h"

namespace pyringar::stress {

void table_round(Random& random);      // cuda/table.h: every alignment and edge, all at once
void fused_all_round(Random& random);  // cuda/fused.cuh: every dtype, reduction and k
void fused_round(Random& random);
void fused_mean_round(Random& random);  // every division, over the values where rounding is hard
void ring_round(Random& random);        // cuda/ring.cuh
void ring_withheld_round(Random& random);

// Tensors lie at any element's address, as torch's views do. Apart: the first two tensors disagree
// modulo 16 bytes.
enum class Addresses { kAligned, kAlike, kApart };
Addresses random_addresses(Random& random);

// Tensors of one size with random contents, and what they held before. Canaries before them, and
// behind every other one.
class Tensors {
 public:
  Tensors(Random& random, DType dtype, std::size_t count, std::size_t numel, Addresses addresses);

  void* const* pointers() const { return pointers_.data(); }
  void* operator[](std::size_t i) const { return pointers_[i]; }
  std::size_t count() const { return pointers_.size(); }
  std::size_t bytes() const { return bytes_; }
  std::vector<const void*> before() const;
  // Replaces the contents of tensor i, and what it held before.
  void set(std::size_t i, const void* contents);

  void check_canaries() const;
  void check_unchanged() const;

 private:
  std::size_t bytes_;
  std::vector<Guarded> memory_;
  std::vector<void*> pointers_;
  std::vector<std::vector<std::byte>> before_;
};

// Flags that begin at `base`; what else is on their lines is zero, as hosts leave it.
std::vector<std::uint32_t> flags_from(std::uint32_t base, std::size_t count);

// Nothing that a test should see the end of.
inline constexpr std::uint64_t kLongNs = 600'000'000'000;

// The kernel of a dtype and a reduction, from the same table as the host's launches.
template <typename... Arguments>
auto kernel_of(DType dtype, const Fold& fold, cuda::KernelKind kind) {
  using Kernel = void (*)(Arguments...);
  return reinterpret_cast<Kernel>(const_cast<void*>(cuda::kernel_function(dtype, fold, kind)));
}

}  // namespace pyringar::stress
