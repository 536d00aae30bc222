// plan: which parameters share a bucket.
//
// Floor     bucket: core and the standard library.
// Units     bytes; parameters are named by their index, the same on every rank.
// Contract  a pure function, hence equal on all ranks. Every parameter of `order` is in exactly one
//           bucket. A bucket holds one kind. It closes when it has reached its cap. The first
//           bucket has its own cap. Buckets come in the order in which they close, parameters in
//           the order of `order`.
// Threads   any.
// Tests     tests/test_bucketing.py
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace pyringar {

using BucketItem = std::pair<std::size_t, int>;  // bytes, and kind: a dtype
using Bucket = std::vector<std::size_t>;

inline std::vector<Bucket> plan_buckets(const std::vector<BucketItem>& items,
                                        const std::vector<std::size_t>& order,
                                        std::size_t first_cap_bytes, std::size_t cap_bytes) {
  struct Open {
    int kind;
    std::size_t bytes;
    Bucket bucket;
  };
  std::vector<Bucket> closed;
  std::vector<Open> open;  // one per kind, in the order of their first parameters
  for (const std::size_t index : order) {
    const auto& [bytes, kind] = items.at(index);
    std::size_t at = 0;
    while (at < open.size() && open[at].kind != kind) ++at;
    if (at == open.size()) open.push_back({kind, 0, {}});
    open[at].bytes += bytes;
    open[at].bucket.push_back(index);
    if (open[at].bytes < (closed.empty() ? first_cap_bytes : cap_bytes)) continue;
    closed.push_back(std::move(open[at].bucket));
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
  }
  for (Open& rest : open) closed.push_back(std::move(rest.bucket));
  return closed;
}

}  // namespace pyringar
