// call_cache: checked all-reduces of a group, to run again on tensors at the same addresses.
//
// Contract  find() returns a call only where a check of the same arguments would make it again: as
//           many lists of as many tensors, each with the memory, layout, dtype and device that the
//           tensor had, and none that autograd watches. It keeps no tensor and no memory alive.
//           Anything else is null, for the checks of a call to refuse or to prepare.
// Threads   with the GIL held. A call that is found may run without it.
// Tests     tests/conformance/test_prepared.py
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include "bindings/tensor.h"
#include "core/collective.h"

namespace pyringar {

struct CallKey {
  bool is_coalesced;
  Reduction reduction;
  Algorithm algorithm;

  bool operator==(const CallKey&) const = default;
};

// The tensors of a call, in one tuple or in one for each rank.
using TensorTuples = std::vector<py::tuple>;

class CallCache {
 public:
  // tensors: as the caller passed them. Empty where they are no list or tuple, or lists of those.
  static TensorTuples tuples_of(py::handle tensors, bool is_coalesced);

  std::shared_ptr<const Collective> find(const CallKey& key, const TensorTuples& tuples) const;
  // Call it before the call runs: tensors may get other memory meanwhile. The first call with a
  // tensor only leaves a mark, because calls of new tensors every time are never found again.
  void keep(const CallKey& key, const TensorTuples& tuples, std::shared_ptr<const Collective> call);

 private:
  static constexpr std::size_t kMostCalls = 64;

  struct Entry {
    CallKey key;
    std::vector<std::size_t> sizes;  // of the tuples
    std::vector<Place> places;
    std::shared_ptr<const Collective> call;  // null: seen once
  };

  // By the memory of the first tensor.
  std::unordered_map<const void*, std::shared_ptr<const Entry>> entries_;
};

}  // namespace pyringar
