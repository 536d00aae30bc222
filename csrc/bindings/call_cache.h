// call_cache: prepared all-reduces of a group, to run again on tensors at the same addresses.
//
// Contract  find() returns a call only if preparing it again would give the same call: equal
//           options, memory, layouts, dtypes and devices, and no tensor that autograd records. Else
//           null. The cache keeps no tensor alive.
// Threads   with the GIL held. A found call may run without it.
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

struct PreparedCall {
  PreparedCall(const CallOptions& options, const GivenTensors& tensors,
               std::shared_ptr<const Collective> checked);

  bool has_options(const CallOptions& other) const {
    return options.operation == other.operation && options.reduction == other.reduction &&
           options.algorithm == other.algorithm;
  }
  void check_unchanged(const GivenTensors& tensors) const;

  CallOptions options;
  std::vector<TensorIdentity> identities;
  std::shared_ptr<const Collective> call;
};

class CallCache {
 public:
  std::shared_ptr<const Collective> find(const CallOptions& options,
                                         const GivenTensors& tensors) const;
  // Store a call for find(), before the call runs, since its tensors may change afterwards. The
  // first call at an address only records a digest, so calls on ever new tensors are never stored.
  void keep(const CallOptions& options, const GivenTensors& tensors,
            std::shared_ptr<const Collective> call);

 private:
  static constexpr std::size_t kMostCalls = 64;

  // Key: digest of the options and the first tensor's memory. find() compares the whole entry.
  std::unordered_map<std::uint64_t, std::shared_ptr<const PreparedCall>> entries_;
  std::array<std::uint64_t, kMostCalls> noted_{};  // digests, each at digest % kMostCalls
};

}  // namespace pyringar
