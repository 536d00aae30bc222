// oracle: 16-bit conversions, random values, and folds as plain loops.
#include "oracle.h"
#include "core/exact_sum.h"
#include "core/tree.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <type_traits>

namespace pyringar::stress {

namespace {

constexpr std::size_t kLineBytes = 64;

struct Format {
  int mantissa_bits;
  int lowest_exponent;  // smallest exponent of normal numbers
  int highest_exponent;
};
constexpr Format kFloat16Format = {10, -14, 15};
constexpr Format kBFloat16Format = {7, -126, 127};

double decode(std::uint16_t bits, const Format& format) {
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == format.highest_exponent - format.lowest_exponent + 2) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  const int leading = exponent == 0 ? 0 : 1 << format.mantissa_bits;
  const int scale = format.lowest_exponent + std::max(exponent - 1, 0) - format.mantissa_bits;
  return sign * std::ldexp(leading + mantissa, scale);
}

std::uint16_t encode(double value, const Format& format) {
  const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const int infinite = (format.highest_exponent - format.lowest_exponent + 2)
                       << format.mantissa_bits;
  const auto with_sign = [&](int rest) { return static_cast<std::uint16_t>(sign | rest); };
  if (std::isnan(value)) return with_sign(infinite | 1 << (format.mantissa_bits - 1));
  value = std::fabs(value);
  if (value >= std::ldexp(1.0, format.highest_exponent + 1)) return with_sign(infinite);
  if (value == 0) return sign;
  const int exponent = std::max(std::ilogb(value), format.lowest_exponent);
  // Scale to units of the last place, which is exact. Then round, ties to even.
  const int units =
      static_cast<int>(std::nearbyint(std::ldexp(value, format.mantissa_bits - exponent)));
  // Add the exponent to the units. If rounding carries, the carry raises the exponent.
  return with_sign(units + ((exponent - format.lowest_exponent) << format.mantissa_bits));
}

template <typename T>
struct Element {
  using Partial = T;
  static Partial widen(T x) { return x; }
  static T narrow(Partial x) { return x; }
};
template <>
struct Element<Float16> {
  using Partial = float;
  static float widen(Float16 x) { return static_cast<float>(value_of(x)); }
  static Float16 narrow(float x) { return nearest_float16(x); }
};
template <>
struct Element<BFloat16> {
  using Partial = float;
  static float widen(BFloat16 x) { return static_cast<float>(value_of(x)); }
  static BFloat16 narrow(float x) { return nearest_bfloat16(x); }
};

template <typename Action>
void with_element(DType dtype, Action&& action) {
  switch (dtype) {
    case DType::kFloat64:
      return action(double{});
    case DType::kFloat32:
      return action(float{});
    case DType::kFloat16:
      return action(Float16{});
    case DType::kBFloat16:
      return action(BFloat16{});
    case DType::kInt8:
      return action(std::int8_t{});
    case DType::kUInt8:
      return action(std::uint8_t{});
    case DType::kInt32:
      return action(std::int32_t{});
    case DType::kInt64:
      return action(std::int64_t{});
  }
}

template <typename P>
P combine(ReduceOp op, P a, P b) {
  constexpr bool kInteger = std::is_integral_v<P>;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      if constexpr (kInteger) {
        return static_cast<P>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
      } else {
        return a + b;
      }
    case ReduceOp::kProd:
      if constexpr (kInteger) {
        return static_cast<P>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
      } else {
        return a * b;
      }
    case ReduceOp::kMax:
    case ReduceOp::kMin:
      break;
  }
  if constexpr (!kInteger) {
    if (std::isnan(a)) return a;
    if (std::isnan(b)) return b;
  }
  if (a == b) return b;
  return (a > b) == (op == ReduceOp::kMax) ? a : b;
}

template <typename T>
T at(const void* from, std::size_t i) {
  T x;
  std::memcpy(&x, static_cast<const std::byte*>(from) + i * sizeof x, sizeof x);
  return x;
}

template <typename T>
void put(void* to, std::size_t i, T x) {
  std::memcpy(static_cast<std::byte*>(to) + i * sizeof x, &x, sizeof x);
}

template <typename T>
T finished(typename Element<T>::Partial partial, int divisor) {
  using P = typename Element<T>::Partial;
  if constexpr (std::is_integral_v<P>) {
    return static_cast<T>(partial / divisor);
  } else {
    return Element<T>::narrow(partial / static_cast<P>(divisor));
  }
}

enum class Values { kPositions, kModerate, kAnyBits, kEdges };

template <typename T>
T from_double(double x) {
  if constexpr (std::is_same_v<T, Float16>) {
    return nearest_float16(static_cast<float>(x));
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    return nearest_bfloat16(static_cast<float>(x));
  } else {
    return static_cast<T>(x);
  }
}

template <typename T>
T random_bits(Random& random) {
  const std::uint64_t bits = random.bits();
  T x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

template <typename T>
T random_edge(Random& random) {
  if constexpr (std::is_integral_v<T>) {
    const T edges[] = {0, 1, std::numeric_limits<T>::min(), std::numeric_limits<T>::max()};
    return edges[random.below(4)];
  } else {
    // Zeros, the smallest and largest fp16 values, the smallest normal fp32, half the smallest
    // fp16, one, infinities, NaN.
    const double edges[] = {0.0,      -0.0,    0x1p-24, -0x1p-24, 65504.0,   -65504.0,
                            0x1p-126, 0x1p-25, 1.0,     HUGE_VAL, -HUGE_VAL, std::nan("")};
    return from_double<T>(edges[random.below(std::size(edges))]);
  }
}

template <typename T>
T random_value(Random& random, Values values, std::size_t i, std::size_t salt) {
  switch (values) {
    case Values::kPositions:
      return from_double<T>(static_cast<double>(i % 17 + salt % 5));
    case Values::kModerate: {
      const double unit = static_cast<double>(random.bits() >> 11) * 0x1p-53;
      if constexpr (std::is_same_v<T, std::uint8_t>) return from_double<T>(unit * 255);
      return from_double<T>((unit - 0.5) * 200);
    }
    case Values::kAnyBits:
      return random_bits<T>(random);
    case Values::kEdges:
      return random_edge<T>(random);
  }
  return T{};
}

template <typename T>
bool is_nan(T x) {
  if constexpr (std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>) {
    return std::isnan(value_of(x));
  } else if constexpr (std::is_floating_point_v<T>) {
    return std::isnan(x);
  } else {
    return false;
  }
}

std::string hex(const void* from, std::size_t bytes) {
  std::string text = "0x";
  for (std::size_t i = bytes; i-- > 0;) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<const unsigned char*>(from)[i]);
    text += digits;
  }
  return text;
}

}  // namespace

double value_of(Float16 x) { return decode(x.bits, kFloat16Format); }
double value_of(BFloat16 x) { return decode(x.bits, kBFloat16Format); }
Float16 nearest_float16(float value) { return {encode(value, kFloat16Format)}; }
BFloat16 nearest_bfloat16(float value) { return {encode(value, kBFloat16Format)}; }

DType random_dtype(Random& random) { return kAllDTypes[random.below(std::size(kAllDTypes))]; }
ReduceOp random_op(Random& random) { return kAllOps[random.below(std::size(kAllOps))]; }

Fold random_fold(Random& random, int world_size) {
  Fold fold = random_gpu_fold(random, world_size);
  if (has_order(fold.op, Order::kExact) && random.one_in(4)) fold.order = Order::kExact;
  return fold;
}

Fold random_gpu_fold(Random& random, int world_size) {
  const Order order = random.one_in(3) ? Order::kTree : Order::kRank;
  return Fold::of({random_op(random), order}, world_size);
}

void fill(Random& random, DType dtype, void* to, std::size_t n) {
  const auto values = static_cast<Values>(random.below(4));
  const std::size_t salt = random.below(1000);
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    for (std::size_t i = 0; i < n; ++i) put<T>(to, i, random_value<T>(random, values, i, salt));
  });
}

namespace {

template <typename P>
P tree_of(ReduceOp op, const std::vector<P>& x, int lo, int hi) {
  if (hi - lo == 1) return x[static_cast<std::size_t>(lo)];
  const int mid = tree_split(lo, hi);
  return combine(op, tree_of(op, x, lo, mid), tree_of(op, x, mid, hi));
}

template <typename P>
P left_fold(ReduceOp op, const std::vector<P>& x) {
  P sum = x[0];
  for (std::size_t r = 1; r < x.size(); ++r) sum = combine(op, sum, x[r]);
  return sum;
}

std::vector<int> ring_order(int world_size, int chunk) {
  std::vector<int> order;
  for (int i = 1; i <= world_size; ++i) order.push_back((chunk + i) % world_size);
  return order;
}

// Reduce sources[order[0]], sources[order[1]], ... from left to right.
void reduce_elements(DType dtype, ReduceOp op, int divisor, const void* const* sources,
                     const std::vector<int>& order, Range range, void* expected) {
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    for (std::size_t i = range.begin; i < range.end; ++i) {
      auto sum = Element<T>::widen(at<T>(sources[order[0]], i));
      for (std::size_t r = 1; r < order.size(); ++r) {
        sum = combine(op, sum, Element<T>::widen(at<T>(sources[order[r]], i)));
      }
      put<T>(expected, i, finished<T>(sum, divisor));
    }
  });
}

// is_last: the caller rounds the sum to 16 bits. Round to odd here, so that only that step rounds.
template <typename P>
P exact_sum(const std::vector<P>& x, bool is_last) {
  if constexpr (std::is_integral_v<P>) {
    return left_fold(ReduceOp::kSum, x);
  } else {
    ExactSum sum;
    for (const P term : x) sum.add(static_cast<double>(term));
    if constexpr (sizeof(P) == 8) return sum.rounded();
    return is_last ? round_to_odd(sum.rounded_to_odd()) : static_cast<P>(sum.rounded_to_odd());
  }
}

}  // namespace

void fold_elements(DType dtype, const Fold& fold, const std::vector<const void*>& sources,
                   Range range, void* expected) {
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    using P = typename Element<T>::Partial;
    const auto k = static_cast<int>(sources.size());
    std::vector<P> x(sources.size());
    for (std::size_t i = range.begin; i < range.end; ++i) {
      for (std::size_t r = 0; r < x.size(); ++r) x[r] = Element<T>::widen(at<T>(sources[r], i));
      const P sum = fold.order == Order::kExact  ? exact_sum(x, sizeof(T) == 2 && fold.divisor == 1)
                    : fold.order == Order::kTree ? tree_of(fold.op, x, 0, k)
                                                 : left_fold(fold.op, x);
      put<T>(expected, i, finished<T>(sum, fold.divisor));
    }
  });
}

void check_same(DType dtype, const void* got, const void* expected, std::size_t n,
                const std::string& what) {
  const std::size_t item = item_bytes(dtype);
  if (n == 0 || std::memcmp(got, expected, n * item) == 0) return;
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    for (std::size_t i = 0; i < n; ++i) {
      const T a = at<T>(got, i);
      const T b = at<T>(expected, i);
      const bool same = std::memcmp(&a, &b, sizeof a) == 0 || (is_nan(a) && is_nan(b));
      CHECK(same, what, ", ", dtype_name(dtype), " element ", i, " of ", n, " is ", hex(&a, item),
            ", expected ", hex(&b, item));
    }
  });
}

std::vector<std::byte> expected_reduction(DType dtype, const Fold& fold,
                                          const std::vector<const void*>& sources,
                                          std::size_t numel, bool in_ring_order) {
  const int k = static_cast<int>(sources.size());
  std::vector<std::byte> expected(numel * item_bytes(dtype));
  if (!in_ring_order) {
    fold_elements(dtype, fold, sources, {0, numel}, expected.data());
    return expected;
  }
  for (int chunk = 0; chunk < k; ++chunk) {
    reduce_elements(dtype, fold.op, fold.divisor, sources.data(), ring_order(k, chunk),
                    chunk_range(numel, k, chunk), expected.data());
  }
  return expected;
}

Addresses random_addresses(Random& random) { return static_cast<Addresses>(random.below(3)); }

Tensors::Tensors(Random& random, DType dtype, std::size_t count, std::size_t numel,
                 Addresses addresses)
    : dtype_(dtype), numel_(numel) {
  const std::size_t places = kLineBytes / item_bytes(dtype);
  const std::size_t common = addresses == Addresses::kAligned ? 0 : random.below(places);
  for (std::size_t i = 0; i < count; ++i) {
    std::size_t place = common;
    if (addresses == Addresses::kApart && i > 0) {
      place = i == 1 ? (common + 1) % places : random.below(places);
    }
    std::size_t offset = place * item_bytes(dtype);
    if (addresses == Addresses::kAnyByte) offset = random.below(kLineBytes);
    std::byte* data = memory_.emplace_back(random, bytes(), offset).data();
    fill(random, dtype, data, numel);
    pointers_.push_back(data);
    before_.emplace_back(data, data + bytes());
  }
}

std::vector<const void*> Tensors::before() const {
  std::vector<const void*> pointers;
  for (const auto& bytes : before_) pointers.push_back(bytes.data());
  return pointers;
}

void Tensors::set(std::size_t i, const void* contents) {
  std::memcpy(pointers_[i], contents, bytes());
  std::memcpy(before_[i].data(), contents, bytes());
}

Buffers Tensors::buffers() const {
  const auto k = static_cast<int>(count());
  return {pointers(), pointers(), k, k, numel_, dtype_};
}

void Tensors::check_canaries() const {
  for (const Guarded& memory : memory_) memory.check_canaries();
}

void Tensors::check_unchanged() const {
  check_canaries();
  for (std::size_t i = 0; i < count(); ++i) {
    const auto* now = static_cast<const std::byte*>(pointers_[i]);
    CHECK(std::equal(before_[i].begin(), before_[i].end(), now), "tensor ", i, " was written");
  }
}

void Tensors::check_all_reduced(Fold fold, bool in_ring_order, const char* what) const {
  const std::vector<std::byte> expected =
      expected_reduction(dtype_, fold, before(), numel_, in_ring_order);
  for (std::size_t rank = 0; rank < count(); ++rank) {
    check_same(dtype_, pointers_[rank], expected.data(), numel_,
               join(what, " ", op_name(fold.op), " in ", order_name(fold.order), " order over ",
                    count(), " ranks, rank ", rank));
    // All ranks hold equal bits, even in NaNs.
    CHECK(bytes() == 0 || std::memcmp(pointers_[rank], pointers_[0], bytes()) == 0, what, ": rank ",
          rank, " holds other bits than rank 0");
  }
  check_canaries();
}

RingTensors::RingTensors(Random& random, const Fold& fold, const Buffers& shape, bool in_place,
                         Addresses (*at)(Random& random))
    : fold_(fold), shape_(shape), in_place_(in_place) {
  for (int rank = 0; rank < shape.num_sources; ++rank) {
    const std::size_t own = chunk_range(shape.numel, shape.num_sources, rank).size();
    const bool has_chunk = shape.phases == RingPhases::kAllGather;
    inputs_.emplace_back(random, shape.dtype, 1, has_chunk ? own : shape.numel, at(random));
    if (in_place) continue;
    const bool gets_chunk = shape.phases == RingPhases::kReduceScatter;
    outputs_.emplace_back(random, shape.dtype, 1, gets_chunk ? own : shape.numel, at(random));
  }
}

std::vector<std::byte> RingTensors::expected() const {
  std::vector<const void*> sources;
  std::vector<std::byte> gathered;
  for (const Tensors& input : inputs_) {
    sources.push_back(input.before()[0]);
    const auto* bytes = static_cast<const std::byte*>(sources.back());
    gathered.insert(gathered.end(), bytes, bytes + input.bytes());
  }
  if (shape_.phases == RingPhases::kAllGather) return gathered;
  return expected_reduction(shape_.dtype, fold_, sources, shape_.numel, true);
}

void RingTensors::check() const {
  const std::vector<std::byte> whole = expected();
  const std::size_t item = item_bytes(shape_.dtype);
  for (int rank = 0; rank < shape_.num_sources; ++rank) {
    const bool is_chunk = shape_.phases == RingPhases::kReduceScatter;
    const Range range =
        is_chunk ? chunk_range(shape_.numel, shape_.num_sources, rank) : Range{0, shape_.numel};
    check_same(shape_.dtype, output(rank), whole.data() + range.begin * item, range.size(),
               join("ring phases ", static_cast<int>(shape_.phases), " ", op_name(fold_.op),
                    " over ", shape_.num_sources, " ranks, rank ", rank));
    // All ranks hold equal bits, even in NaNs.
    CHECK(is_chunk || std::memcmp(output(rank), output(0), shape_.numel * item) == 0, "rank ", rank,
          " holds other bits than rank 0");
  }
  for (const Tensors& input : inputs_) in_place_ ? input.check_canaries() : input.check_unchanged();
  for (const Tensors& output : outputs_) output.check_canaries();
}

}  // namespace pyringar::stress
