// tensors: see emulated.h.

#include <algorithm>
#include <cstring>

#include "cuda/args.h"
#include "emulated.h"

namespace pyringar::stress {

namespace {

constexpr std::size_t kLineBytes = 64;

}  // namespace

Addresses random_addresses(Random& random) { return static_cast<Addresses>(random.below(3)); }

std::vector<std::uint32_t> flags_from(std::uint32_t base, std::size_t count) {
  std::vector<std::uint32_t> words(count * cuda::kFlagStride);
  for (std::size_t i = 0; i < words.size(); i += cuda::kFlagStride) words[i] = base;
  return words;
}

Tensors::Tensors(Random& random, DType dtype, std::size_t count, std::size_t numel,
                 Addresses addresses)
    : bytes_(numel * item_bytes(dtype)) {
  const std::size_t places = kLineBytes / item_bytes(dtype);
  const std::size_t common = addresses == Addresses::kAligned ? 0 : random.below(places);
  for (std::size_t i = 0; i < count; ++i) {
    std::size_t place = common;
    if (addresses == Addresses::kApart && i > 0) {
      place = i == 1 ? (common + 1) % places : random.below(places);
    }
    std::byte* data = memory_.emplace_back(random, bytes_, place * item_bytes(dtype)).data();
    fill(random, dtype, data, numel);
    pointers_.push_back(data);
    before_.emplace_back(data, data + bytes_);
  }
}

std::vector<const void*> Tensors::before() const {
  std::vector<const void*> pointers;
  for (const auto& bytes : before_) pointers.push_back(bytes.data());
  return pointers;
}

void Tensors::set(std::size_t i, const void* contents) {
  std::memcpy(pointers_[i], contents, bytes_);
  std::memcpy(before_[i].data(), contents, bytes_);
}

void Tensors::check_canaries() const {
  for (const Guarded& memory : memory_) memory.check_canaries();
}

void Tensors::check_unchanged() const {
  check_canaries();
  for (std::size_t i = 0; i < count(); ++i) {
    const auto* now = static_cast<const std::byte*>(pointers_[i]);
    CHECK(std::equal(before_[i].begin(), before_[i].end(), now), "input ", i, " was written");
  }
}

}  // namespace pyringar::stress
