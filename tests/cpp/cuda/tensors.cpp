// tensors: see emulated.h.

#include <algorithm>
#include <cstring>

#include "cuda/args.h"
#include "emulated.h"

namespace pyringar::stress {

namespace {

constexpr std::size_t kGuardBytes = 64;
constexpr std::byte kCanary{0xa5};

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
  const std::size_t places = kGuardBytes / item_bytes(dtype);
  const std::size_t common = addresses == Addresses::kAligned ? 0 : random.below(places);
  for (std::size_t i = 0; i < count; ++i) {
    std::size_t place = common;
    if (addresses == Addresses::kApart && i > 0) {
      place = i == 1 ? (common + 1) % places : random.below(places);
    }
    const std::size_t before = kGuardBytes + place * item_bytes(dtype);
    const std::size_t behind = random.one_in(2) ? 0 : kGuardBytes;
    const std::size_t all = before + bytes_ + behind;
    memory_.push_back({std::make_unique_for_overwrite<std::byte[]>(all), before, behind});
    std::fill_n(memory_.back().bytes.get(), all, kCanary);
    std::byte* data = memory_.back().bytes.get() + before;
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
  for (const Memory& memory : memory_) {
    const std::byte* end = memory.bytes.get() + memory.before + bytes_;
    for (std::size_t i = 0; i < memory.before; ++i) {
      CHECK(memory.bytes[i] == kCanary, "written ", memory.before - i, " bytes before ", bytes_);
    }
    for (std::size_t i = 0; i < memory.behind; ++i) {
      CHECK(end[i] == kCanary, "written ", i, " bytes behind ", bytes_);
    }
  }
}

void Tensors::check_unchanged() const {
  check_canaries();
  for (std::size_t i = 0; i < count(); ++i) {
    const auto* now = static_cast<const std::byte*>(pointers_[i]);
    CHECK(std::equal(before_[i].begin(), before_[i].end(), now), "input ", i, " was written");
  }
}

}  // namespace pyringar::stress
