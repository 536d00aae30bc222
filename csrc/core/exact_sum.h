// exact_sum: the exact sum of floating-point numbers, rounded once.
// Units     digits of 32 bits; bit 0 of digit 0 is 2^-1074, the smallest double.
// Contract  The result does not depend on the order of the numbers. It overflows only if the exact
//           sum does. A sum of -0 only is -0. Infinities and NaN give the same result as +.
// Cost      100 ns for a few numbers. cpu/kernels_exact uses it only where its fast path fails.
// Source    Kulisch 2013, "Computer Arithmetic and Validity"; Boldo and Melquiond 2008 (odd)
// Tests     the static_asserts below; tests/conformance/test_bits.py
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "core/schedule.h"

namespace pyringar {

// Round to odd: an inexact double becomes the neighboring float whose last bit is 1.
constexpr float round_to_odd(double exact) {
  const auto nearest = static_cast<float>(exact);
  const auto bits = std::bit_cast<std::uint32_t>(nearest);
  const double back = nearest;
  if (back == exact || exact != exact || bits % 2 == 1) return nearest;
  const bool is_too_large = (back > exact) != (exact < 0);
  return std::bit_cast<float>(is_too_large ? bits - 1 : bits + 1);
}

class ExactSum {
 public:
  // Add one number; at most 2^30 numbers per sum.
  constexpr void add(double x) {
    const auto bits = std::bit_cast<std::uint64_t>(x);
    const int exponent = static_cast<int>(bits >> kFractionBits & 0x7ffu);
    if (exponent == 0x7ff) {
      specials_ = has_specials_ ? specials_ + x : x;
      has_specials_ = true;
      return;
    }
    is_negative_zero_ = is_negative_zero_ && bits == kSign;
    const std::uint64_t fraction = bits & (kImplicitBit - 1);
    const std::uint64_t mantissa = exponent == 0 ? fraction : fraction | kImplicitBit;
    if (mantissa == 0) return;
    const int place = exponent == 0 ? 0 : exponent - 1;  // position of the mantissa's last bit
    const int shift = place % kDigitBits;
    const std::uint64_t low = mantissa << shift;
    const std::uint64_t high = shift == 0 ? 0 : mantissa >> (64 - shift);
    const std::int64_t sign = (bits & kSign) != 0 ? -1 : 1;
    const int first = place / kDigitBits;
    digits_[first] += sign * static_cast<std::int64_t>(low & kDigitMask);
    digits_[first + 1] += sign * static_cast<std::int64_t>(low >> kDigitBits);
    digits_[first + 2] += sign * static_cast<std::int64_t>(high);
    first_ = std::min(first_, first);
    last_ = std::max(last_, first + 2);
  }

  constexpr double rounded() const { return round(false); }
  // Round an inexact sum to the neighboring double whose last bit is 1. A second rounding, to fewer
  // bits, then gives the same result as rounding the sum directly.
  constexpr double rounded_to_odd() const { return round(true); }

 private:
  static constexpr int kDigitBits = 32;
  static constexpr std::int64_t kDigitMask = 0xffffffff;
  static constexpr int kFractionBits = 52;
  static constexpr std::uint64_t kImplicitBit = std::uint64_t{1} << kFractionBits;
  static constexpr std::uint64_t kSign = std::uint64_t{1} << 63;
  static constexpr int kNumDigits = 2046 / kDigitBits + 5;  // for all exponents, and for carries

  constexpr double round(bool to_odd) const {
    if (has_specials_) return specials_;
    if (last_ < 0) return is_negative_zero_ ? -0.0 : 0.0;
    ExactSum sum = *this;
    const bool is_negative = sum.carry();
    if (is_negative) {
      for (int i = first_; i <= sign_digit(); ++i) sum.digits_[i] = -sum.digits_[i];
      sum.carry();
    }
    int top = sign_digit();
    while (top >= first_ && sum.digits_[top] == 0) --top;
    if (top < first_) return is_negative_zero_ ? -0.0 : 0.0;
    const auto leading = static_cast<std::uint32_t>(sum.digits_[top]);
    const int place = top * kDigitBits + kDigitBits - 1 - std::countl_zero(leading);
    const std::uint64_t magnitude = sum.bits_from(place, to_odd);
    return std::bit_cast<double>(magnitude | (is_negative ? kSign : 0));
  }

  // Bring all digits except the highest into [0, 2^32). Return true if the sum is negative.
  constexpr bool carry() {
    for (int i = first_; i < sign_digit(); ++i) {
      digits_[i + 1] += digits_[i] >> kDigitBits;  // arithmetic shift: rounds down
      digits_[i] &= kDigitMask;
    }
    return digits_[sign_digit()] < 0;
  }
  // The highest digit that a carry can reach.
  constexpr int sign_digit() const { return last_ + 2; }

  constexpr std::uint64_t bits_from(int place, bool to_odd) const {
    if (place < kFractionBits) return low_bits(0, place + 1);  // a subnormal double
    const int last = place - kFractionBits;
    std::uint64_t fraction = low_bits(last, kFractionBits);
    const auto exponent = static_cast<std::uint64_t>(last) + 1;
    const bool half = last > 0 && low_bits(last - 1, 1) == 1;
    const bool rest = last > 1 && any_below(last - 1);
    std::uint64_t bits = exponent << kFractionBits | fraction;
    if (to_odd) {
      bits |= half || rest ? 1 : 0;
    } else if (half && (rest || bits % 2 == 1)) {
      bits += 1;  // a carry out of the fraction increments the exponent
    }
    constexpr std::uint64_t kInfinity = std::uint64_t{0x7ff} << kFractionBits;
    return std::min(bits, kInfinity);
  }

  constexpr std::uint64_t low_bits(int place, int num) const {
    std::uint64_t bits = 0;
    for (int i = 0; i < num;) {
      const int shift = (place + i) % kDigitBits;
      bits |= static_cast<std::uint64_t>(digits_[(place + i) / kDigitBits] >> shift) << i;
      i += kDigitBits - shift;
    }
    return bits & ((std::uint64_t{1} << num) - 1);
  }
  constexpr bool any_below(int place) const {
    for (int i = 0; i < place / kDigitBits; ++i) {
      if (digits_[i] != 0) return true;
    }
    return low_bits(place / kDigitBits * kDigitBits, place % kDigitBits) != 0;
  }

  std::int64_t digits_[kNumDigits] = {};
  int first_ = kNumDigits;  // index of the lowest digit that was written
  int last_ = -1;           // index of the highest digit that was written
  bool is_negative_zero_ = true;
  bool has_specials_ = false;
  double specials_ = 0;
};

namespace exact_sum_test {

constexpr double sum_of(std::initializer_list<double> numbers) {
  ExactSum sum;
  for (const double x : numbers) sum.add(x);
  return sum.rounded();
}
constexpr double kMost = std::numeric_limits<double>::max();
constexpr double kLeast = std::numeric_limits<double>::denorm_min();
static_assert(sum_of({0x1p60, 1.0, -0x1p60}) == 1.0, "1 survives cancellation");
static_assert(sum_of({kMost, kMost, -kMost}) == kMost, "no intermediate overflow");
static_assert(sum_of({kMost, kMost}) == std::numeric_limits<double>::infinity());
static_assert(sum_of({1.0, 0x1p-53}) == 1.0 && sum_of({1.0, 0x1p-53, kLeast}) > 1.0,
              "one rounding");
static_assert(sum_of({-1.0, -0x1p-53}) == -1.0 && sum_of({-1.0, -0x1p-53, -kLeast}) < -1.0);
static_assert(sum_of({kLeast, kLeast}) == 2 * kLeast && sum_of({1.5, -1.5, -kLeast}) == -kLeast);
static_assert(std::bit_cast<std::int64_t>(sum_of({-0.0, -0.0})) < 0 &&
              std::bit_cast<std::int64_t>(sum_of({-0.0, 0.0})) == 0);

}  // namespace exact_sum_test

}  // namespace pyringar
