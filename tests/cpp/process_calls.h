// process_calls: random calls of ranks in processes, and their expected results.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "oracle.h"
#include "process/process_call.h"

namespace pyringar::stress {

struct Shape {
  DType dtype;
  std::size_t numel;
};

struct Case {
  CallKind kind;
  Fold fold;
  int root;
  std::vector<Shape> shapes;  // all_reduce: shape per tensor; else of one rank's chunk
  std::uint64_t seed;
  bool is_async = false;
};

struct CallTensors {
  std::deque<Tensors> inputs;
  std::deque<Tensors> outputs;                // empty for calls in place
  std::vector<std::vector<std::byte>> after;  // copies of the results, or empty

  const std::deque<Tensors>& results() const { return outputs.empty() ? inputs : outputs; }
};

CallKind random_kind(Random& random);
CallTensors make_tensors(const Case& made, int world_size, int rank);
Collective call_of(const Case& made, const CallTensors& tensors, int world_size);
void check_case(const Case& made, const std::vector<const CallTensors*>& all, int rank);
void check_unchanged(const CallTensors& tensors);

}  // namespace pyringar::stress
