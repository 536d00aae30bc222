// direct: every device folds its slices from all devices' inputs into all outputs, between two
// barriers inside the kernel. Rank order on many GPUs.
//
// Floor     cuda: device code.
// Contract  one launch per device, all with the same number of blocks, all co-resident. Block b of
//           a device tells block b of every other that its device's inputs are there (its launch
//           came after their producers on the stream), and waits for theirs; likewise at the end,
//           so that no device leaves before all have written to it. All tiles of a block index, on
//           all devices together, are covered by the blocks of that index.
//           A block that folds shows the others how far it has come.
//           Flags count barriers, two per launch, and never go back; the count lies beside them in
//           device memory, so a replayed graph goes on where the last replay ended.
// Tests     tests/cpp/cuda/direct_test.cpp (two devices of threads), tests/cuda
#pragma once

#include "cuda/flag.cuh"
#include "cuda/fused.cuh"

namespace pyringar::cuda {

// Of block `block_index()` among the flags that a device has from another.
PYRINGAR_DEVICE inline std::size_t flag_from(const BarrierPorts& ports, int device) {
  return static_cast<std::size_t>(device * ports.max_blocks + static_cast<int>(block_index())) *
         kFlagStride;
}

// signal(flag) on every other device, by a thread for each.
template <typename Signal>
PYRINGAR_DEVICE void on_each_peer(const BarrierPorts& ports, Signal&& signal) {
  const int peer = static_cast<int>(thread_index());
  if (peer < ports.num_devices && peer != ports.device) {
    signal(ports.arrived_there[peer] + flag_from(ports, ports.device));
  }
}

// All threads of the block call it.
PYRINGAR_DEVICE inline bool device_barrier(const BarrierPorts& ports, std::uint32_t target,
                                           BlockWaits& waits) {
  fence_system();
  block_barrier();
  on_each_peer(ports, [&](std::uint32_t* flag) { store_release(flag, target); });
  bool all_came = true;
  for (int from = 0; all_came && from < ports.num_devices; ++from) {
    if (from == ports.device) continue;
    all_came = waits.wait(ports.arrived + flag_from(ports, from), target, 0, [&](Failure& failure) {
      failure.what = Awaited::kBarrier;
      failure.rank = ports.device;
      failure.peer = from;
      failure.step = target % 2 == 1 ? 0 : 1;
    });
  }
  return all_came;
}

template <typename E, typename Op, typename T>
PYRINGAR_KERNEL(kThreads)
direct_kernel(PYRINGAR_KERNEL_ARG T table, PYRINGAR_KERNEL_ARG BarrierPorts ports,
              PYRINGAR_KERNEL_ARG Patience patience) {
  if (patience.withheld == ports.device) return;
  BlockWaits waits(patience, block_words());
  const std::size_t at = static_cast<std::size_t>(block_index()) * kFlagStride;
  const std::uint32_t passed = load_acquire(ports.count + at);
  if (!device_barrier(ports, passed + 1, waits)) return;
  fold_tiles<E, Op>(table.view(), [&](std::uint32_t tile) {
    on_each_peer(ports, [&](std::uint32_t* flag) { progressed(flag, tile); });
  });
  if (!device_barrier(ports, passed + 2, waits)) return;
  if (thread_index() == 0) store_release(ports.count + at, passed + 2);
}

}  // namespace pyringar::cuda
