// table_test: cuda/table.h over all alignments, element sizes, and sizes around every edge.

#include "cuda/tables.h"

#include <algorithm>

#include "emulated.h"

namespace pyringar::stress {

namespace {

using cuda::find_segment;
using cuda::LargeTable;
using cuda::Segment;
using cuda::SmallTable;
using cuda::TableBuilder;
using cuda::TableView;
using cuda::tile_elems;

// Never read: only the address counts.
void* address(std::size_t misalignment) {
  return reinterpret_cast<void*>(std::uintptr_t{1} << 20 | misalignment);
}

std::vector<std::size_t> edge_sizes(std::size_t item) {
  const std::size_t tile = tile_elems(item);
  std::vector<std::size_t> sizes = {0, 1, 2, 3};
  for (const std::size_t edge : {16 / item, 32 / item, tile, tile + 16 / item, 3 * tile}) {
    for (std::size_t more = 0; more <= 18; ++more) {
      if (edge + more >= 9) sizes.push_back(edge + more - 9);
    }
  }
  return sizes;
}

// How often each element is covered if tiles are what the contract says.
void check_covered_once(const Segment& segment, std::size_t item, const std::string& what) {
  const Range vectors = cuda::vector_range(segment, item);
  CHECK(vectors.begin == segment.head && vectors.end <= segment.numel, what);
  CHECK(vectors.size() % (16 / item) == 0, what, ": vectors of ", vectors.size(), " elements");
  std::vector<int> covered(segment.numel);
  const auto cover = [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) ++covered[i];
  };
  const std::uint32_t tiles = cuda::num_tiles(segment, item);
  for (std::uint32_t t = 0; t < tiles; ++t) {
    const std::size_t begin = segment.head + t * tile_elems(item);
    if (segment.vector == 0) {
      cover(begin, std::min<std::size_t>(begin + tile_elems(item), segment.numel));
      continue;
    }
    cover(begin, std::min(begin + tile_elems(item), vectors.end));
    if (t > 0) continue;
    cover(0, vectors.begin);
    cover(vectors.end, segment.numel);
  }
  for (std::size_t i = 0; i < segment.numel; ++i) {
    CHECK(covered[i] == 1, what, ": element ", i, " of ", segment.numel, " is in ", covered[i],
          " ranges");
  }
}

void check_vectors_aligned(const TableView& view, const Segment& segment, std::size_t item,
                           bool in_place, const std::string& what) {
  if (segment.vector == 0) return;
  const int others = in_place ? 0 : view.num_destinations;
  for (int i = 0; i < view.num_sources + others; ++i) {
    const void* pointer = i < view.num_sources
                              ? view.pointers[segment.sources + i]
                              : view.pointers[segment.destinations + i - view.num_sources];
    const auto first = reinterpret_cast<std::uintptr_t>(pointer) + segment.head * item;
    CHECK(first % 16 == 0 || cuda::vector_range(segment, item).size() == 0, what, ": pointer ", i,
          " has unaligned vectors");
  }
}

void check_one_segment(std::size_t item, std::size_t numel, std::size_t source,
                       std::size_t destination, bool in_place) {
  SmallTable table;
  TableBuilder<SmallTable> builder(table, item, 2, in_place ? 2 : 1, 1);
  void* sources[] = {address(source), address(in_place ? destination : source)};
  void* destinations[] = {address(destination)};
  CHECK(builder.add(sources, in_place ? sources : destinations, numel), "no room for one segment");
  const Segment& segment = table.segments[0];
  const std::string what = join("items of ", item, " bytes at ", source, " and ", destination,
                                in_place ? " in place, " : ", ", numel, " elements");
  CHECK(segment.numel == numel && table.num_tiles == cuda::num_tiles(segment, item), what);
  CHECK(table.num_pointers == (in_place ? 2u : 3u), what, ": ", table.num_pointers, " pointers");
  CHECK((segment.vector == 1) == (source == destination && source % item == 0), what);
  CHECK(segment.head < 16 / item || segment.head == 0, what, ": head ", segment.head);
  check_vectors_aligned(table.view(), segment, item, in_place, what);
  check_covered_once(segment, item, what);
}

void check_find_segment(Random& random, std::size_t item) {
  LargeTable table;
  TableBuilder<LargeTable> builder(table, item, 1, 1, 1);
  const std::vector<std::size_t> sizes = edge_sizes(item);
  const auto segments = static_cast<std::uint32_t>(random.between(1, LargeTable::kMaxSegments));
  std::vector<std::uint32_t> owner;
  for (std::uint32_t s = 0; s < segments; ++s) {
    void* pointer[] = {address(item * random.below(16 / item))};
    CHECK(builder.add(pointer, pointer, sizes[random.below(sizes.size())]), "segment ", s);
    CHECK(table.segments[s].first_tile == owner.size(), "segment ", s);
    owner.insert(owner.end(), cuda::num_tiles(table.segments[s], item), s);
  }
  CHECK(owner.size() == table.num_tiles, owner.size(), " tiles, not ", table.num_tiles);
  for (std::uint32_t tile = 0; tile < table.num_tiles; ++tile) {
    const std::uint32_t found = find_segment(table.view(), tile);
    CHECK(found == owner[tile], "tile ", tile, " of segment ", owner[tile], " found in ", found);
  }
}

// As many as fit are taken, one more is refused and changes nothing.
template <typename T>
void check_refuses_when_full(int num_sources, int num_destinations) {
  T table;
  TableBuilder<T> builder(table, 4, num_sources, num_destinations, 1);
  const std::vector<void*> sources(static_cast<std::size_t>(num_sources), address(0));
  const std::vector<void*> destinations(static_cast<std::size_t>(num_destinations), address(0));
  void* const* to = destinations.data();
  if (num_destinations == 0) {  // in place
    table.num_destinations = num_sources;
    to = sources.data();
  }
  const int room = std::min(T::kMaxPointers / (num_sources + num_destinations), T::kMaxSegments);
  for (int i = 0; i < room; ++i) {
    CHECK(builder.add(sources.data(), to, 100), "refused ", i, " of ", room);
  }
  const std::uint32_t tiles = table.num_tiles;
  CHECK(!builder.add(sources.data(), to, 100), "took more than ", room);
  CHECK(table.num_tiles == tiles && table.num_segments == static_cast<std::uint32_t>(room),
        table.num_segments, " segments, not ", room);
}

// A list takes as few launches as the largest table allows, of one in the smallest table that does.
void check_launches(int k, bool in_place, int num_tensors) {
  std::vector<void*> pointers(2 * static_cast<std::size_t>(k), address(0));
  void** to = in_place ? pointers.data() : pointers.data() + k;
  const std::vector<Buffers> tensors(static_cast<std::size_t>(num_tensors),
                                     Buffers{pointers.data(), to, k, k, 100, DType::kFloat32});
  const int each = in_place ? k : 2 * k;
  const bool fits_small =
      num_tensors <= SmallTable::kMaxSegments && num_tensors * each <= SmallTable::kMaxPointers;
  const int wanted = fits_small ? SmallTable::kMaxPointers : LargeTable::kMaxPointers;
  const int room = std::min(LargeTable::kMaxSegments, LargeTable::kMaxPointers / each);
  int num_launches = 0;
  int num_launched = 0;
  const auto launch = [&]<typename T>(DType, const T* table) {
    CHECK(T::kMaxPointers == wanted, num_tensors, " tensors of ", k, " ranks in a table of ",
          T::kMaxPointers, " pointers");
    num_launches += 1;
    num_launched += static_cast<int>(table->num_segments);
  };
  if (room == 0) {
    return check_throws(ErrorKind::kUnsupported, join("", "test: ", k, " ranks are more than"),
                        [&] { cuda::launch_tables({tensors, {}, "test"}, 1, launch); });
  }
  cuda::launch_tables({tensors, {}, "test"}, 1, launch);
  CHECK(num_launched == num_tensors && num_launches == (num_tensors + room - 1) / room,
        num_launches, " launches of ", num_launched, " tensors, not of ", num_tensors);
}

void check_launches_around_borders() {
  for (const int k : {1, 2, 4, 8, 48, 49, 96, 97, 320, 321, 640, 641}) {
    for (const bool in_place : {true, false}) {
      const int each = in_place ? k : 2 * k;
      for (const int border : {SmallTable::kMaxPointers / each, SmallTable::kMaxSegments,
                               LargeTable::kMaxPointers / each, LargeTable::kMaxSegments}) {
        for (int n = std::max(1, border - 1); n <= border + 1; ++n) check_launches(k, in_place, n);
      }
    }
  }
}

}  // namespace

void table_round(Random& random) {
  for (const std::size_t item : {1, 2, 4, 8}) {
    const std::vector<std::size_t> sizes = edge_sizes(item);
    for (std::size_t source = 0; source < 16; ++source) {
      for (std::size_t destination = 0; destination < 16; ++destination) {
        // Where they disagree all sizes are alike: a few will do.
        const std::size_t tried = source == destination ? sizes.size() : 4;
        for (std::size_t i = 0; i < tried; ++i) {
          const std::size_t numel =
              source == destination ? sizes[i] : sizes[random.below(sizes.size())];
          check_one_segment(item, numel, source, destination, random.one_in(2));
        }
      }
    }
    for (int i = 0; i < 20; ++i) check_find_segment(random, item);
  }
  for (const int k : {1, 2, 3, 8, 17, 32, 48}) {
    check_refuses_when_full<SmallTable>(k, k);
    check_refuses_when_full<SmallTable>(k, 0);
    check_refuses_when_full<LargeTable>(k, k);
    check_refuses_when_full<LargeTable>(k, 0);
    check_refuses_when_full<LargeTable>(k, 1);
    check_refuses_when_full<LargeTable>(1, k);
  }
  check_launches_around_borders();
}

}  // namespace pyringar::stress
