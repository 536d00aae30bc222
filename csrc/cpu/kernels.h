// kernels: the loops over elements, one set per dtype and reduction, chosen once per call.
//
// Units     n in elements; every pointer to n of them: elements as in memory, or partials
//           (partial_bytes(dtype) each). Nothing is owned or kept.
// Contract  The sum that core/fold.h defines, for every n, alignment and cut of a range. A
//           destination may be one of the sources, not overlap one halfway.
// Tests     tests/conformance/test_bits.py, tests/cpp/stress.cpp
#pragma once

#include <cstddef>

#include "core/fold.h"

namespace pyringar {

// All sources in one pass to all destinations. divisor: of a mean, whose kernels are kSum's.
using FusedKernel = void (*)(const void* const* sources, int num_sources, void* const* destinations,
                             int num_destinations, std::size_t n, int divisor);
FusedKernel fused_kernel(DType dtype, const Fold& fold);

// In rank order only: what a ring needs besides.
struct Kernels {
  FusedKernel fused;
  // element -> partial; partial + element -> partial; partial + element -> finished elements.
  void (*widen)(const void* own, void* partial_out, std::size_t n);
  void (*accumulate)(const void* partial_in, const void* own, void* partial_out, std::size_t n);
  void (*finish)(const void* partial_in, const void* own, void* const* destinations,
                 int num_destinations, std::size_t n, int divisor);
};

const Kernels& kernels(DType dtype, ReduceOp op);

// In exact order, which has sums of floats only.
FusedKernel exact_kernel(DType dtype);

}  // namespace pyringar
