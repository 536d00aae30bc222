// strided: iterates over the last dimension in a loop, and over the others with an index counter.
#include "cpu/strided.h"

#include <algorithm>
#include <cstring>

namespace pyringar {

namespace {

constexpr std::int64_t kProgressElems = 1 << 17;

// Call visit(pointer) for each element in index order, until it returns false.
template <typename Visit>
void for_each_element(const StridedView& view, Visit&& visit, const Progressed& progressed) {
  const std::size_t ndim = view.shape.size();
  if (ndim == 0) {
    visit(view.data);
    return;
  }
  if (std::ranges::find(view.shape, 0) != view.shape.end()) return;
  const auto item = static_cast<std::int64_t>(view.item);
  const std::int64_t inner = view.shape[ndim - 1];
  const std::int64_t inner_stride = view.strides[ndim - 1] * item;
  std::vector<std::int64_t> index(ndim, 0);
  std::byte* row = view.data;
  for (std::int64_t visited = 0;;) {
    for (std::int64_t i = 0; i < inner;) {
      const std::int64_t end = std::min(inner, i + kProgressElems);
      visited += end - i;
      for (; i < end; ++i) {
        if (!visit(row + i * inner_stride)) return;
      }
      if (visited >= kProgressElems) {
        progressed();
        visited = 0;
      }
    }
    for (std::size_t dim = ndim - 1;;) {
      if (dim-- == 0) return;
      row += view.strides[dim] * item;
      if (++index[dim] < view.shape[dim]) break;
      row -= view.strides[dim] * item * view.shape[dim];
      index[dim] = 0;
    }
  }
}

// Call run(word) with an unsigned integer of the element's size.
template <typename Run>
void with_word(std::size_t item, Run&& run) {
  switch (item) {
    case 1:
      return run(std::uint8_t());
    case 2:
      return run(std::uint16_t());
    case 4:
      return run(std::uint32_t());
    default:
      return run(std::uint64_t());
  }
}

template <typename Run>
void with_sign(const StridedView& view, Run&& run) {
  with_word(view.item, [&](auto word) {
    using Word = decltype(word);
    switch (view.sign) {
      case Sign::kPlain:
        return run(word, [](Word bits) { return bits; });
      case Sign::kBit:
        return run(word, [](Word bits) {
          return static_cast<Word>(bits ^ Word{1} << (8 * sizeof(Word) - 1));
        });
      case Sign::kComplement:
        return run(word, [](Word bits) { return static_cast<Word>(Word{0} - bits); });
    }
  });
}

std::vector<std::size_t> by_stride(const StridedView& view) {
  std::vector<std::size_t> dims;
  for (std::size_t dim = 0; dim < view.shape.size(); ++dim) {
    if (view.shape[dim] != 1) dims.push_back(dim);
  }
  std::sort(dims.begin(), dims.end(),
            [&](std::size_t a, std::size_t b) { return view.strides[a] < view.strides[b]; });
  return dims;
}

// Return true if each stride exceeds the extent of all smaller dims, as in slices of dense tensors.
bool is_nested(const StridedView& view, const std::vector<std::size_t>& dims) {
  std::int64_t reach = 0;
  for (const std::size_t dim : dims) {
    if (view.strides[dim] <= reach) return false;
    reach += (view.shape[dim] - 1) * view.strides[dim];
  }
  return true;
}

// Return true if two elements of the first `count` dims lie `distance` bytes apart, give or take
// less than an item. Dims are nested: only two index differences per dim are candidates.
bool comes_near(const StridedView& view, const std::vector<std::size_t>& dims, std::size_t count,
                std::int64_t distance) {
  const auto item = static_cast<std::int64_t>(view.item);
  if (count == 0) return -item < distance && distance < item;
  const std::size_t dim = dims[count - 1];
  const std::int64_t stride = view.strides[dim] * item;
  const std::int64_t below = distance / stride - (distance % stride < 0 ? 1 : 0);
  for (const std::int64_t steps : {below, below + 1}) {
    const bool exists = -view.shape[dim] < steps && steps < view.shape[dim];
    if (exists && comes_near(view, dims, count - 1, distance - steps * stride)) return true;
  }
  return false;
}

// Mark the bytes of a view inside a window; return false if a byte was marked already.
bool mark(const StridedView& view, ByteSpan window, std::vector<bool>& marked) {
  bool fresh = true;
  for_each_element(
      view,
      [&](const std::byte* element) {
        for (std::size_t b = 0; b < view.item; ++b) {
          const std::byte* byte = element + b;
          if (byte < window.first || byte >= window.last) continue;
          auto seen = marked[static_cast<std::size_t>(byte - window.first)];
          if (seen) fresh = false;
          seen = true;
        }
        return fresh;
      },
      [] {});
  return fresh;
}

template <bool kToDense>
void copy_elements(const StridedView& view, std::byte* dense, const Progressed& progressed) {
  with_sign(view, [&](auto word, auto change) {
    for_each_element(
        view,
        [&](std::byte* element) {
          std::memcpy(&word, kToDense ? element : dense, sizeof word);
          word = change(word);
          std::memcpy(kToDense ? dense : element, &word, sizeof word);
          dense += sizeof word;
          return true;
        },
        progressed);
  });
}

}  // namespace

void pack(const StridedView& from, std::byte* to, const Progressed& progressed) {
  copy_elements<true>(from, to, progressed);
}

void unpack(std::byte* from, const StridedView& to, const Progressed& progressed) {
  copy_elements<false>(to, from, progressed);
}

ByteSpan span_of(const StridedView& view) {
  std::int64_t last = 0;  // torch's strides are never negative
  for (std::size_t dim = 0; dim < view.shape.size(); ++dim) {
    if (view.shape[dim] == 0) return {view.data, view.data};
    last += (view.shape[dim] - 1) * view.strides[dim];
  }
  return {view.data, view.data + (static_cast<std::size_t>(last) + 1) * view.item};
}

bool overlaps_itself(const StridedView& view) {
  if (is_nested(view, by_stride(view))) return false;
  const ByteSpan span = span_of(view);
  std::vector<bool> marked(static_cast<std::size_t>(span.last - span.first));
  return !mark(view, span, marked);
}

bool overlap(const StridedView& a, const StridedView& b) {
  const ByteSpan span_a = span_of(a);
  const ByteSpan span_b = span_of(b);
  const ByteSpan both = {std::max(span_a.first, span_b.first), std::min(span_a.last, span_b.last)};
  if (both.first >= both.last) return false;
  const std::vector<std::size_t> dims = by_stride(a);
  if (a.item == b.item && a.shape == b.shape && a.strides == b.strides && is_nested(a, dims)) {
    return comes_near(a, dims, dims.size(), b.data - a.data);
  }
  std::vector<bool> marked(static_cast<std::size_t>(both.last - both.first));
  return !mark(a, both, marked) || !mark(b, both, marked);
}

}  // namespace pyringar
