// staging: see the header.
//
// Tests     tests/cpp/cuda_processes, tests/test_cuda_processes.py

#include "cuda_process/staging.h"

#include <algorithm>

#include "core/error.h"
#include "cuda/folds.h"

namespace pyringar::cuda {

namespace {

constexpr std::size_t kMostProbeWords = 4096;

std::vector<Event> visible_events(int device) {
  std::vector<Event> events;
  for (std::uint32_t i = 0; i < kStagingSlots; ++i)
    events.emplace_back(device, Visible::kToProcesses);
  return events;
}

std::vector<Event> open_events(int device,
                               const std::array<cudaIpcEventHandle_t, kStagingSlots>& handles) {
  std::vector<Event> events;
  for (const cudaIpcEventHandle_t& handle : handles) events.emplace_back(device, handle);
  return events;
}

std::vector<std::uint32_t> pattern_of(int rank, std::size_t num_words) {
  std::vector<std::uint32_t> words(num_words);
  const auto seed = static_cast<std::uint32_t>(rank + 1) * 0x9e3779b9u;
  for (std::size_t i = 0; i < num_words; ++i) {
    words[i] = (seed ^ static_cast<std::uint32_t>(i)) * 2654435761u;
  }
  return words;
}

}  // namespace

OwnStaging::OwnStaging(int device_index, std::size_t bytes_per_slot)
    : device(device_index),
      slot_bytes(bytes_per_slot),
      slots(device_memory(device, kStagingSlots * slot_bytes)),
      announced(visible_events(device)),
      reduced(visible_events(device)) {}

StagingHandles OwnStaging::handles() const {
  StagingHandles handles{};
  handles.slot_bytes = slot_bytes;
  handles.slots = ipc_handle(slots);
  for (std::size_t i = 0; i < kStagingSlots; ++i) {
    handles.announced[i] = announced[i].ipc_handle();
    handles.reduced[i] = reduced[i].ipc_handle();
  }
  return handles;
}

ProcessStaging::ProcessStaging(const OwnStaging& own, int rank, std::span<const StagingHandles> all)
    : own_(own), rank_(rank), probe_stream_(own.device), last_(own.device) {
  for (int r = 0; r < static_cast<int>(all.size()); ++r) {
    if (r == rank) {
      bases_.push_back(as<std::byte>(own.slots));
      continue;
    }
    const StagingHandles& theirs = all[static_cast<std::size_t>(r)];
    if (theirs.slot_bytes != own.slot_bytes) {
      fail(ErrorKind::kState, "rank ", r, " has slots of ", theirs.slot_bytes, " bytes, expected ",
           own.slot_bytes, ": do all ranks run the same pyringar?");
    }
    peers_.push_back({r, map_memory(own.device, theirs.slots),
                      open_events(own.device, theirs.announced),
                      open_events(own.device, theirs.reduced)});
    bases_.push_back(static_cast<std::byte*>(peers_.back().slots.get()));
  }
}

// Probes lie in message 0's slot, what was read of each peer's in message 1's, one after the other.
void ProcessStaging::write_probe() {
  const OnDevice guard(own_.device);
  const std::size_t words = std::min(kMostProbeWords, own_.slot_bytes / sizeof(std::uint32_t));
  const std::vector<std::uint32_t> pattern = pattern_of(rank_, words);
  check(cudaMemcpyAsync(slot(rank_, 0), pattern.data(), words * sizeof(std::uint32_t),
                        cudaMemcpyDefault, probe_stream_.get()),
        "cudaMemcpyAsync", own_.device);
  record_announced(0, probe_stream_.get());
  check(cudaStreamSynchronize(probe_stream_.get()), "cudaStreamSynchronize", own_.device);
}

std::string ProcessStaging::look_at_probes() {
  const OnDevice guard(own_.device);
  const std::size_t num_words = std::min(kMostProbeWords, own_.slot_bytes / sizeof(std::uint32_t));
  const cudaStream_t stream = probe_stream_.get();
  await_announced(0, stream);
  for (const Peer& peer : peers_) {
    // A kernel reads, as later; the host looks at what it has read.
    Folds copies = Folds::copies();
    copies.add_copy(slot(rank_, 1), slot(peer.rank, 0), num_words * sizeof(std::uint32_t),
                    DType::kInt32);
    copies.launch(own_.device, stream);
    std::vector<std::uint32_t> found(num_words);
    check(cudaMemcpyAsync(found.data(), slot(rank_, 1), num_words * sizeof(std::uint32_t),
                          cudaMemcpyDefault, stream),
          "cudaMemcpyAsync", own_.device);
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize", own_.device);
    const std::vector<std::uint32_t> wanted = pattern_of(peer.rank, num_words);
    const auto differs = std::mismatch(found.begin(), found.end(), wanted.begin());
    if (differs.first != found.end()) {
      return join("cuda:", own_.device, " finds ", *differs.first, " in word ",
                  differs.first - found.begin(), " of the memory of rank ", peer.rank,
                  ", which wrote ", *differs.second);
    }
  }
  return {};
}

}  // namespace pyringar::cuda
