// parts: what the files of this program share; each brings its parts, which main() runs.
#pragma once

#include <span>
#include <vector>

#include "cases.h"

namespace pyringar::stress {

using Streams = std::vector<cudaStream_t>;
using Ranks = std::vector<int>;

struct Part {
  const char* name;
  void (*check)(Random& random);
  int one_in;  // rounds
};
std::span<const Part> capture_parts();

void start(Random& random, model::Options options = {});
cuda::GroupOptions random_options(Random& random);
Streams make_capturable(const cuda::Group& group);  // none is the null stream

}  // namespace pyringar::stress
