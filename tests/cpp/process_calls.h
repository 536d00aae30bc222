// process_calls: calls of ranks in processes, with any tensors, and what they must give.
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
  std::vector<Shape> shapes;  // all_reduce: of all tensors; else of the share
  std::uint64_t seed;
  bool is_async = false;
};

// One rank's tensors of a case.
struct CallTensors {
  std::deque<Tensors> inputs;
  std::deque<Tensors> outputs;                // where they are not the inputs
  std::vector<std::vector<std::byte>> after;  // copies of the results, or none

  const std::deque<Tensors>& results() const { return outputs.empty() ? inputs : outputs; }
};

// Of those that ranks in processes have.
CallKind random_kind(Random& random);
CallTensors make_tensors(const Case& made, int world_size, int rank);
Collective call_of(const Case& made, const CallTensors& tensors, int world_size);
// One rank's results, from what went in on all ranks.
void check_case(const Case& made, const std::vector<const CallTensors*>& all, int rank);
void check_unchanged(const CallTensors& tensors);

}  // namespace pyringar::stress
