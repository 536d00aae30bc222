// dtype: the element types and reductions that all engines support.
// Units     bytes for sizes.
// Contract  16-bit floats are added in fp32 and rounded once. Other types are added as they are.
//           Integers wrap.
// Tests     tests/conformance/test_bits.py compares each dtype and op with an oracle, bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>

namespace pyringar {

enum class DType : std::uint8_t {
  kFloat64,
  kFloat32,
  kFloat16,
  kBFloat16,
  kInt8,
  kUInt8,
  kInt32,
  kInt64,
};
inline constexpr int kNumDTypes = 8;

// kMean is kSum with one division after the last addition. Integers are divided towards zero.
enum class ReduceOp : std::uint8_t { kSum, kMean, kMax, kMin, kProd };
inline constexpr int kNumReduceOps = 5;

struct Float16 {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};

template <DType kDType>
using ItemOf = std::tuple_element_t<static_cast<int>(kDType),
                                    std::tuple<double, float, Float16, BFloat16, std::int8_t,
                                               std::uint8_t, std::int32_t, std::int64_t>>;

template <typename Run>
constexpr decltype(auto) with_dtype(DType dtype, Run&& run) {
  switch (dtype) {
    case DType::kFloat64:
      return run.template operator()<DType::kFloat64>();
    case DType::kFloat32:
      return run.template operator()<DType::kFloat32>();
    case DType::kFloat16:
      return run.template operator()<DType::kFloat16>();
    case DType::kBFloat16:
      return run.template operator()<DType::kBFloat16>();
    case DType::kInt8:
      return run.template operator()<DType::kInt8>();
    case DType::kUInt8:
      return run.template operator()<DType::kUInt8>();
    case DType::kInt32:
      return run.template operator()<DType::kInt32>();
    case DType::kInt64:
      return run.template operator()<DType::kInt64>();
  }
  __builtin_unreachable();
}

constexpr std::size_t item_bytes(DType dtype) {
  constexpr std::uint8_t kBytes[kNumDTypes] = {8, 4, 2, 2, 1, 1, 4, 8};
  return kBytes[static_cast<int>(dtype)];
}

constexpr bool is_float(DType dtype) { return dtype <= DType::kBFloat16; }

constexpr std::size_t partial_bytes(DType dtype) {
  return dtype == DType::kFloat16 || dtype == DType::kBFloat16 ? 4 : item_bytes(dtype);
}

constexpr const char* dtype_name(DType dtype) {
  constexpr const char* kNames[kNumDTypes] = {"float64", "float32", "float16", "bfloat16",
                                              "int8",    "uint8",   "int32",   "int64"};
  return kNames[static_cast<int>(dtype)];
}

constexpr const char* op_name(ReduceOp op) {
  constexpr const char* kNames[kNumReduceOps] = {"sum", "mean", "max", "min", "prod"};
  return kNames[static_cast<int>(op)];
}

}  // namespace pyringar
