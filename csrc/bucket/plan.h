// plan: which parameters' gradients travel together.
//
// Floor     bucket: core and the standard library.
// Units     bytes; parameters are named by their index, the same on every rank.
// Contract  a pure function of sizes, kinds, order and caps, hence equal on all ranks. Every
//           parameter of `order` is in exactly one bucket, whole; a bucket holds one kind and
//           closes once it has reached its cap, so that one large tensor may fill it alone. The
//           very first bucket has a cap of its own: a small one leaves early. Buckets come in the
//           order in which they close, parameters in the order of `order`.
// Threads   pure functions, any.
// Tests     tests/test_bucketing.py
#pragma once

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

namespace pyringar {

struct BucketItem {
  std::size_t bytes;
  int kind;  // dtype and devices: what may share a bucket
};

using Bucket = std::vector<int>;

inline std::vector<Bucket> plan_buckets(std::span<const BucketItem> items,
                                        std::span<const int> order, std::size_t first_cap_bytes,
                                        std::size_t cap_bytes) {
  struct Open {
    int kind;
    std::size_t bytes;
    Bucket bucket;
  };
  std::vector<Bucket> closed;
  std::vector<Open> open;  // one for each kind, in the order of their first parameters
  for (const int index : order) {
    const BucketItem& item = items[static_cast<std::size_t>(index)];
    std::size_t at = 0;
    while (at < open.size() && open[at].kind != item.kind) ++at;
    if (at == open.size()) open.push_back({item.kind, 0, {}});
    open[at].bytes += item.bytes;
    open[at].bucket.push_back(index);
    if (open[at].bytes < (closed.empty() ? first_cap_bytes : cap_bytes)) continue;
    closed.push_back(std::move(open[at].bucket));
    open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
  }
  for (Open& rest : open) closed.push_back(std::move(rest.bucket));
  return closed;
}

}  // namespace pyringar
