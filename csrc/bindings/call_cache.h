// call_cache: prepared all-reduces of a group, to run again on tensors at the same addresses.
//
// Contract  find() returns a call only if a check of the same arguments would make it again: as
//           many ranks and tensors, with the same memory, layouts, dtypes and devices, and no
//           tensor that autograd watches. Else null. It keeps no tensor and no memory alive.
// Threads   with the GIL held. A call that is found may run without it.
// Tests     tests/conformance/test_prepared.py
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "bindings/prepare.h"
#include "bindings/tensor.h"
#include "core/collective.h"

namespace pyringar {

// A checked call, and where its tensors lay.
struct PreparedCall {
  PreparedCall(const CallOptions& options, const GivenTensors& tensors,
               std::shared_ptr<const Collective> checked);

  bool is_of(const CallOptions& other) const {
    return options.operation == other.operation && options.reduction == other.reduction &&
           options.algorithm == other.algorithm;
  }
  // Throws for the first tensor that has other memory, or another layout.
  void check_unchanged(const GivenTensors& tensors) const;

  CallOptions options;
  std::vector<TensorIdentity> identities;
  std::shared_ptr<const Collective> call;
};

class CallCache {
 public:
  std::shared_ptr<const Collective> find(const CallOptions& options,
                                         const GivenTensors& tensors) const;
  // Call it before the call runs: tensors may get other memory meanwhile. The first call with a
  // tensor's memory is only noted: a program that makes a new tensor each time repeats no call.
  void keep(const CallOptions& options, const GivenTensors& tensors,
            std::shared_ptr<const Collective> call);

 private:
  static constexpr std::size_t kMostCalls = 64;

  // By a digest of the first tensor's memory and the options: entries compare both.
  std::unordered_map<std::uint64_t, std::shared_ptr<const PreparedCall>> entries_;
  std::array<std::uint64_t, kMostCalls> noted_{};  // digests, each at its own remainder
};

}  // namespace pyringar
