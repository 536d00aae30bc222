// strided_view: a tensor whose elements need not lie side by side.
//
// Units     shape and strides in elements; data borrowed.
// Tests     tests/conformance/test_layouts.py
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyringar {

// How memory holds an element: as it is, or negated as torch does lazily, in a float's sign bit or
// an integer's two's complement.
enum class Sign : std::uint8_t { kPlain, kBit, kComplement };

struct StridedView {
  std::byte* data;
  std::size_t item;
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  Sign sign = Sign::kPlain;
};

}  // namespace pyringar
