// strided_test: pack, unpack and overlap against brute force over index tuples.

#include "cpu/strided.h"

#include <algorithm>
#include <map>
#include <set>

#include "stress.h"

namespace pyringar::stress {

namespace {

constexpr std::size_t kMemoryBytes = 4096;

// Byte offsets of a view's elements from its data, in the order of the index.
std::vector<std::size_t> offsets_of(const StridedView& view) {
  std::size_t numel = 1;
  for (const std::int64_t size : view.shape) numel *= static_cast<std::size_t>(size);
  std::vector<std::size_t> offsets;
  for (std::size_t flat = 0; flat < numel; ++flat) {
    std::size_t rest = flat;
    std::size_t offset = 0;
    for (std::size_t dim = view.shape.size(); dim-- > 0;) {
      const auto size = static_cast<std::size_t>(view.shape[dim]);
      offset += rest % size * static_cast<std::size_t>(view.strides[dim]);
      rest /= size;
    }
    offsets.push_back(offset * view.item);
  }
  return offsets;
}

// All bytes of all elements, each as often as it occurs.
std::multiset<const std::byte*> bytes_of(const StridedView& view) {
  std::multiset<const std::byte*> bytes;
  for (const std::size_t offset : offsets_of(view)) {
    for (std::size_t b = 0; b < view.item; ++b) bytes.insert(view.data + offset + b);
  }
  return bytes;
}

bool has_duplicates(const std::multiset<const std::byte*>& bytes) {
  return std::adjacent_find(bytes.begin(), bytes.end()) != bytes.end();
}

// Up to four dimensions; strides in any order, with gaps, without, or of any size (also 0).
StridedView random_view(Random& random, std::size_t item, std::byte* memory, std::size_t bytes) {
  while (true) {
    StridedView view{memory, item, {}, {}};
    const int ndim = random.between(0, 4);
    for (int dim = 0; dim < ndim; ++dim) {
      view.shape.push_back(random.one_in(20) ? 0 : random.between(1, 5));
    }
    view.strides.resize(view.shape.size());
    std::vector<std::size_t> order(view.shape.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random.below(i)]);
    std::int64_t stride = random.one_in(3) ? random.between(2, 3) : 1;
    const bool wild = random.one_in(4);
    for (const std::size_t dim : order) {
      view.strides[dim] = wild ? random.between(0, 6) : stride;
      stride *= std::max<std::int64_t>(1, view.shape[dim]);
      if (random.one_in(4)) stride += random.between(1, 3);
    }
    std::size_t end = 0;
    for (const std::size_t offset : offsets_of(view)) end = std::max(end, offset + item);
    if (end > bytes) continue;
    view.data += random.below(bytes - end + 1) / item * item;
    return view;
  }
}

void check_pack(Random& random, const StridedView& view, Guarded& memory) {
  const std::vector<std::size_t> offsets = offsets_of(view);
  Guarded packed(random, offsets.size() * view.item);
  pack(view, packed.data());
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    CHECK(std::memcmp(packed.data() + i * view.item, view.data + offsets[i], view.item) == 0,
          "element ", i, " of ", offsets.size(), " packed from elsewhere");
  }
  packed.check_canaries();
  if (overlaps_itself(view)) return;

  std::vector<std::byte> expected(memory.data(), memory.data() + memory.size());
  for (std::size_t i = 0; i < packed.size(); ++i) packed.data()[i] = std::byte(random.bits() & 255);
  for (std::size_t i = 0; i < offsets.size(); ++i) {
    std::memcpy(expected.data() + (view.data - memory.data()) + offsets[i],
                packed.data() + i * view.item, view.item);
  }
  unpack(packed.data(), view);
  CHECK(std::equal(expected.begin(), expected.end(), memory.data()), "unpack of ", offsets.size(),
        " elements wrote elsewhere");
  memory.check_canaries();
}

void check_overlap(const StridedView& a, const StridedView& b) {
  const auto bytes_a = bytes_of(a);
  const auto bytes_b = bytes_of(b);
  for (const auto* bytes : {&bytes_a, &bytes_b}) {
    const StridedView& view = bytes == &bytes_a ? a : b;
    const ByteSpan span = span_of(view);
    CHECK(bytes->empty() ? span.first == span.last
                         : span.first == *bytes->begin() && span.last == *bytes->rbegin() + 1,
          "span of ", bytes->size(), " bytes is ", span.last - span.first);
    CHECK(overlaps_itself(view) == has_duplicates(*bytes), "overlaps_itself, ", bytes->size(),
          " bytes");
  }
  if (has_duplicates(bytes_a) || has_duplicates(bytes_b)) return;
  const bool shared = std::any_of(bytes_a.begin(), bytes_a.end(),
                                  [&](const std::byte* byte) { return bytes_b.count(byte) > 0; });
  CHECK(overlap(a, b) == shared, "overlap of ", bytes_a.size(), " and ", bytes_b.size(),
        " bytes, shared: ", shared);
  CHECK(overlap(b, a) == shared, "overlap depends on the order");
}

void strided_round(Random& random) {
  Guarded memory(random, kMemoryBytes);
  for (std::size_t i = 0; i < memory.size(); ++i) memory.data()[i] = std::byte(random.bits() & 255);
  for (int i = 0; i < 20; ++i) {
    const std::size_t item = std::size_t{1} << random.below(4);
    const StridedView view = random_view(random, item, memory.data(), memory.size());
    check_pack(random, view, memory);
    // In a small window, so that spans often cross.
    const StridedView a = random_view(random, item, memory.data(), 256);
    const StridedView b = random_view(random, item, memory.data(), 256);
    check_overlap(a, b);
  }
}

const Part kStrided("strided", &strided_round);

}  // namespace

}  // namespace pyringar::stress
