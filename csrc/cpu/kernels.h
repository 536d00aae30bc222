// kernels: the loops over elements, one set per dtype and reduction.
// Units     n in elements. Pointers point to n elements, or n partials of partial_bytes(dtype).
// Contract  The sum that core/fold.h defines, for each n, alignment and cut of a range. A
//           destination may equal a source, but must not overlap it partially.
// Tests     tests/conformance/test_bits.py, tests/cpp/pool_test.cpp
#pragma once

#include <cstddef>

#include "core/fold.h"

namespace pyringar {

// Reduce all sources into all destinations in one pass. A mean uses the kernel of kSum.
using FusedKernel = void (*)(const void* const* sources, int num_sources, void* const* destinations,
                             int num_destinations, std::size_t n, int divisor);
FusedKernel fused_kernel(DType dtype, const Fold& fold);

// Kernels that reduce in rank order. Only a ring uses widen, accumulate and finish.
struct Kernels {
  FusedKernel fused;
  // Elements to partials; partials + elements to partials; partials + elements to results.
  void (*widen)(const void* own, void* partial_out, std::size_t n);
  void (*accumulate)(const void* partial_in, const void* own, void* partial_out, std::size_t n);
  void (*finish)(const void* partial_in, const void* own, void* const* destinations,
                 int num_destinations, std::size_t n, int divisor);
};

const Kernels& kernels(DType dtype, ReduceOp op);

// Kernel of exact sums of floats; null for integers.
FusedKernel exact_kernel(DType dtype);

}  // namespace pyringar
