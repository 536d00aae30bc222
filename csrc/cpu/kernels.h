// kernels: the loops over elements, one set per dtype and reduction, chosen once per call.
//
// Units     n in elements; every pointer to n of them: elements as in memory, or partials
//           (partial_bytes(dtype) each). Nothing is owned or kept.
// Contract  Left fold in the order of the sources: ((x0 + x1) + x2) + ..., then, for mean, one
//           division, then one rounding. The bits depend on nothing else: not on n, alignment or
//           how a range is cut. A destination may be one of the sources, not overlap one halfway.
// Threads   pure functions of their arguments, any.
// Tests     tests/test_all_reduce.py, tests/cpp/stress.cpp
#pragma once

#include <cstddef>

#include "core/dtype.h"

namespace pyringar {

struct Kernels {
  // All sources in one pass through registers, to all destinations.
  void (*fused)(const void* const* sources, int num_sources, void* const* destinations,
                int num_destinations, std::size_t n, int divisor);
  // element -> partial; partial + element -> partial; partial + element -> finished elements.
  void (*widen)(const void* own, void* partial_out, std::size_t n);
  void (*accumulate)(const void* partial_in, const void* own, void* partial_out, std::size_t n);
  void (*finish)(const void* partial_in, const void* own, void* const* destinations,
                 int num_destinations, std::size_t n, int divisor);
};

// divisor 1 leaves the result as it is; kMean uses kSum's kernels with divisor = world_size.
const Kernels& kernels(DType dtype, ReduceOp op);

// Floats and integers are compiled apart, for the build's sake.
const Kernels& float_kernels(DType dtype, ReduceOp op);
const Kernels& half_kernels(DType dtype, ReduceOp op);
const Kernels& integer_kernels(DType dtype, ReduceOp op);

}  // namespace pyringar
