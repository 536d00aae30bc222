// table_test: which tensors of cuda/table.h have vectors, and what fits into a table. Tiles, heads
// and tails are tested by the bits of fused_test.

#include "cuda/table.h"

#include <algorithm>

#include "emulated.h"
#include "stress.h"

namespace pyringar::stress {

namespace {

using cuda::LargeTable;
using cuda::Segment;
using cuda::SmallTable;
using cuda::TableBuilder;

// Never read: only the address counts.
void* address(std::size_t misalignment) {
  return reinterpret_cast<void*>(std::uintptr_t{1} << 20 | misalignment);
}

// Vectors if all pointers are aligned alike.
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

void table_round(Random& random) {
  for (const std::size_t item : {1, 2, 4, 8}) {
    for (std::size_t source = 0; source < 16; ++source) {
      for (std::size_t destination = 0; destination < 16; ++destination) {
        for (const std::size_t numel : {0, 1, 3, 17, 1000}) {
          check_one_segment(item, numel, source, destination, random.one_in(2));
        }
      }
    }
  }
  check_launches_around_borders();
}

const Part kTable("table", &table_round, kOnce);

}  // namespace

}  // namespace pyringar::stress
