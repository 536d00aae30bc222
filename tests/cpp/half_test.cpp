// half_test: all 16-bit floats and all rounding boundaries, in core/half.h and cpu/lanes.h.

#include <cmath>
#include <cstdio>
#include <limits>

#include "core/half.h"
#include "cpu/lanes.h"
#include "oracle.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

template <typename H>
struct Traits;

template <>
struct Traits<Float16> {
  using Lanes = Float16Lanes;
  using FusedLanes = FusedLanesOf<DType::kFloat16>;
  static constexpr std::uint16_t kInfinity = 0x7c00;
  static constexpr std::uint16_t kQuiet = 0x0200;
  static constexpr double kBeyondLargest = 0x1p16;
  static Float16 narrow(float x) { return narrow_to_float16(x); }
  static Float16 nearest(float x) { return nearest_float16(x); }
};

template <>
struct Traits<BFloat16> {
  using Lanes = BFloat16Lanes;
  using FusedLanes = FusedLanesOf<DType::kBFloat16>;
  static constexpr std::uint16_t kInfinity = 0x7f80;
  static constexpr std::uint16_t kQuiet = 0x0040;
  static constexpr double kBeyondLargest = 0x1p128;
  static BFloat16 narrow(float x) { return narrow_to_bfloat16(x); }
  static BFloat16 nearest(float x) { return nearest_bfloat16(x); }
};

// Convert kLanes floats in memory order to a vector of L. floats_of() is the inverse.
template <typename L>
typename L::Vector vector_of(const float* from) {
  if constexpr (requires { typename L::Half; }) {
    float even[kWords], odd[kWords];
    for (int i = 0; i < kWords; ++i) even[i] = from[2 * i], odd[i] = from[2 * i + 1];
    return {load_vector<BFloat16Lanes::F32>(even), load_vector<BFloat16Lanes::F32>(odd)};
  } else {
    return load_vector<BFloat16Lanes::F32>(from);
  }
}

template <typename L>
void floats_of(const typename L::Vector& v, float* to) {
  if constexpr (requires { typename L::Half; }) {
    float even[kWords], odd[kWords];
    store_vector(v.even, even);
    store_vector(v.odd, odd);
    for (int i = 0; i < kWords; ++i) to[2 * i] = even[i], to[2 * i + 1] = odd[i];
  } else {
    store_vector(v, to);
  }
}

std::string show_hex(std::uint32_t bits) {
  char text[16];
  std::snprintf(text, sizeof text, "%x", bits);
  return text;
}
std::string show(float x) { return join(x, " (bits ", show_hex(float_to_bits(x)), ")"); }

template <typename H>
void check_narrowed(float x, H got, H expected, const char* by) {
  if (std::isnan(x)) {
    const std::uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const std::uint16_t quiet = Traits<H>::kInfinity | Traits<H>::kQuiet;
    CHECK((got.bits & (quiet | 0x8000)) == (quiet | sign), by, " narrows ", show(x), " to ",
          show_hex(got.bits), ", expected a quiet NaN of the same sign");
  } else {
    CHECK(got.bits == expected.bits, by, " narrows ", show(x), " to ", show_hex(got.bits),
          ", expected ", show_hex(expected.bits));
  }
}

template <typename H, typename Lanes>
void check_narrowing(const std::vector<float>& values) {
  std::vector<float> padded = values;
  padded.resize((values.size() + Lanes::kLanes - 1) / Lanes::kLanes * Lanes::kLanes, 1.0f);
  for (std::size_t i = 0; i < padded.size(); i += Lanes::kLanes) {
    H packed[Lanes::kLanes];
    store_vector(Lanes::pack(vector_of<Lanes>(&padded[i])), packed);
    for (std::size_t lane = 0; lane < Lanes::kLanes; ++lane) {
      const float x = padded[i + lane];
      const H expected = Traits<H>::nearest(x);
      check_narrowed(x, Traits<H>::narrow(x), expected, "core/half.h");
      check_narrowed(x, packed[lane], expected, "cpu/lanes.h");
    }
  }
}

template <typename H>
void check_widened(H half, float got, const char* by) {
  const double expected = value_of(half);
  if (std::isnan(expected)) {
    CHECK(std::isnan(got), by, " widens NaN ", show_hex(half.bits), " to ", show(got));
  } else {
    CHECK(got == expected && std::signbit(got) == std::signbit(expected), by, " widens ",
          show_hex(half.bits), " to ", show(got), ", expected ", expected);
  }
}

template <typename H, typename Lanes>
void check_all_halves() {
  for (std::uint32_t first = 0; first < 65536; first += Lanes::kLanes) {
    H halves[Lanes::kLanes];
    for (std::uint32_t lane = 0; lane < Lanes::kLanes; ++lane) {
      halves[lane].bits = static_cast<std::uint16_t>(first + lane);
    }
    float widened[Lanes::kLanes];
    floats_of<Lanes>(Lanes::load(halves), widened);
    for (std::uint32_t lane = 0; lane < Lanes::kLanes; ++lane) {
      const H half = halves[lane];
      check_widened(half, widen(half), "core/half.h");
      check_widened(half, widened[lane], "cpu/lanes.h");
      check_narrowed(widen(half), Traits<H>::narrow(widen(half)), half, "a round trip");
    }
  }
}

// Return the rounding boundaries: between two neighboring halves the middle rounds to the even one,
// and the floats beside the middle round to the nearer one.
template <typename H>
std::vector<float> boundaries() {
  std::vector<float> values;
  for (std::uint16_t bits = 0; bits < Traits<H>::kInfinity; ++bits) {
    const auto next_bits = static_cast<std::uint16_t>(bits + 1);
    const bool last = next_bits == Traits<H>::kInfinity;
    const double low = value_of(H{bits});
    const double high = last ? Traits<H>::kBeyondLargest : value_of(H{next_bits});
    const auto middle = static_cast<float>((low + high) / 2);
    const float below = std::nextafter(middle, 0.0f);
    const float above = std::nextafter(middle, std::numeric_limits<float>::infinity());
    const std::uint16_t even = bits % 2 == 0 ? bits : next_bits;
    CHECK(Traits<H>::nearest(below).bits == bits && Traits<H>::nearest(middle).bits == even &&
              Traits<H>::nearest(above).bits == next_bits,
          "the oracle rounds ", show(middle), " to ", Traits<H>::nearest(middle).bits);
    for (const float x : {below, middle, above}) values.insert(values.end(), {x, -x});
  }
  return values;
}

template <typename H>
void check_type(Random& random) {
  check_all_halves<H, typename Traits<H>::Lanes>();
  check_all_halves<H, typename Traits<H>::FusedLanes>();
  std::vector<float> values = boundaries<H>();
  for (int i = 0; i < 200'000; ++i) {
    values.push_back(bits_to_float(static_cast<std::uint32_t>(random.bits())));
  }
  check_narrowing<H, typename Traits<H>::Lanes>(values);
  check_narrowing<H, typename Traits<H>::FusedLanes>(values);
}

void half_round(Random& random) {
  check_type<Float16>(random);
  check_type<BFloat16>(random);
}

const Part kHalf("half", &half_round, kOnce);

}  // namespace

}  // namespace pyringar::stress
