// direct: barrier, one pass over the rank's own slice, barrier.

#include "cpu/direct.h"

#include "core/error.h"

namespace pyringar {

namespace {

// "sum of 1000 float32 elements", and how many more tensors.
std::string describe(std::span<const Buffers> tensors, ReduceOp op) {
  if (tensors.empty()) return "nothing";
  const Buffers& first = tensors.front();
  const std::string more =
      tensors.size() == 1 ? "" : join(" and ", tensors.size() - 1, " more tensors");
  return join(first.num_sources == 1 ? "copy" : op_name(op), " of ", first.numel, " ",
              dtype_name(first.dtype), " elements", more);
}

template <typename Describe>
bool pass(int rank, Barrier& barrier, std::uint32_t epoch, const char* when, Watch& watch,
          Describe&& describe_call) {
  const int world_size = static_cast<int>(barrier.arrived.size());
  barrier.arrived[static_cast<std::size_t>(rank)].set(epoch);
  for (int peer = 0; peer < world_size; ++peer) {
    Flag& arrived = barrier.arrived[static_cast<std::size_t>(peer)];
    const bool came = watch.wait(rank, arrived, epoch, epoch, [&] {
      return watch.late(join("direct ", describe_call()), rank, peer,
                        join("at the ", when, " barrier"));
    });
    if (!came) return false;
  }
  return true;
}

}  // namespace

bool direct_rank(int rank, std::span<const Buffers> tensors, Fold fold, Barrier& barrier,
                 std::uint32_t base, Watch& watch) {
  const int world_size = static_cast<int>(barrier.arrived.size());
  const auto describe_call = [&] { return describe(tensors, fold.op); };
  if (!pass(rank, barrier, base + 1, "opening", watch, describe_call)) return false;
  for (const Buffers& tensor : tensors) {
    fuse_blocks(tensor, fold, chunk_range(tensor.numel, world_size, rank),
                [&] { watch.progressed(rank); });
  }
  return pass(rank, barrier, base + 2, "closing", watch, describe_call);
}

}  // namespace pyringar
