// process_staging: maps and tests the slots of other processes.
#include "cuda_process/process_staging.h"

#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "core/error.h"
#include "core/ring_program.h"
#include "cuda/folds.h"

namespace pyringar::cuda {

namespace {

constexpr std::size_t kMostProbeWords = 4096;
constexpr std::uint32_t kProbed = 1;
// Most messages by which `reduced` may lag: well below 2^31, where comparisons of counters fail.
constexpr std::uint32_t kMostBehind = std::uint32_t{1} << 30;

std::vector<std::uint32_t> pattern_of(int rank, std::size_t num_words) {
  std::vector<std::uint32_t> words(num_words);
  const auto seed = static_cast<std::uint32_t>(rank + 1) * 0x9e3779b9u;
  for (std::size_t i = 0; i < num_words; ++i) {
    words[i] = (seed ^ static_cast<std::uint32_t>(i)) * 2654435761u;
  }
  return words;
}

using StreamOperation = CUresult (*)(CUstream, CUdeviceptr, cuuint32_t, unsigned);

StreamOperation stream_operation(const char* name) {
  return reinterpret_cast<StreamOperation>(driver_function(name));
}

void check_operation(CUresult status, const char* name, int device) {
  if (status == CUDA_ERROR_NOT_SUPPORTED) {
    fail(ErrorKind::kUnsupported, "cuda:", device, " has no stream memory operations (", name,
         " is refused): its streams cannot wait for other processes");
  }
  check(static_cast<cudaError_t>(status), name, device);
}

bool is_visible(const char* gpu) {
  int device = 0;
  const bool is_here = cudaDeviceGetByPCIBusId(&device, gpu) == cudaSuccess;
  cudaGetLastError();
  return is_here;
}

}  // namespace

RegisteredMemory::RegisteredMemory(int device, void* memory, std::size_t bytes)
    : device_(device), memory_(memory) {
  const OnDevice guard(device);
  const BesideCaptures beside;
  const cudaError_t status =
      cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (status != cudaSuccess) {
    cudaGetLastError();
    fail(ErrorKind::kUnsupported, "cuda:", device, " cannot reach the memory that processes share",
         " (cudaHostRegister of ", bytes, " bytes: ", cudaGetErrorString(status), ")");
  }
  void* there = nullptr;
  const cudaError_t mapped = cudaHostGetDevicePointer(&there, memory, 0);
  if (mapped != cudaSuccess) cudaHostUnregister(memory);
  check(mapped, "cudaHostGetDevicePointer", device);
  device_memory_ = reinterpret_cast<std::uintptr_t>(there);
}

RegisteredMemory::~RegisteredMemory() {
  try {
    const OnDevice guard(device_);
    const BesideCaptures beside;
    cudaHostUnregister(memory_);
  } catch (const Error&) {  // the device does not answer
  }
}

std::uintptr_t RegisteredMemory::on_device(const Word& word) const {
  return device_memory_ +
         (reinterpret_cast<std::uintptr_t>(&word) - reinterpret_cast<std::uintptr_t>(memory_));
}

void RegisteredMemory::write_word(const Word& word, std::uint32_t value,
                                  cudaStream_t stream) const {
  static const StreamOperation write = stream_operation("cuStreamWriteValue32");
  const OnDevice guard(device_);  // the null stream belongs to the current device
  check_operation(write(stream, on_device(word), value, CU_STREAM_WRITE_VALUE_DEFAULT),
                  "cuStreamWriteValue32", device_);
}

void RegisteredMemory::await_word(const Word& word, std::uint32_t value,
                                  cudaStream_t stream) const {
  static const StreamOperation wait = stream_operation("cuStreamWaitValue32");
  const OnDevice guard(device_);
  check_operation(wait(stream, on_device(word), value, CU_STREAM_WAIT_VALUE_GEQ),
                  "cuStreamWaitValue32", device_);
}

StagingHandles describe_gpu(int device) {
  const OnDevice guard(device);
  const BesideCaptures beside;
  StagingHandles handles{};
  check(cudaDeviceGetPCIBusId(handles.gpu.data(), static_cast<int>(handles.gpu.size()), device),
        "cudaDeviceGetPCIBusId", device);
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo", device);
  handles.free_bytes = free;
  return handles;
}

StagingPlan plan_staging(std::span<const StagingHandles> all, std::size_t slot_bytes,
                         std::size_t most_shared_bytes) {
  StagingPlan plan{all.size() > 1, slot_bytes};
  std::size_t free = all[0].free_bytes;
  for (const StagingHandles& rank : all) {
    plan.shares_gpu &= std::strncmp(rank.gpu.data(), all[0].gpu.data(), rank.gpu.size()) == 0;
    free = std::min<std::size_t>(free, rank.free_bytes);
  }
  if (!plan.shares_gpu) return plan;
  const std::size_t bearable = free / kPartOfFree / all.size() / kStagingSlots;
  while (2 * plan.slot_bytes <= std::min(bearable, most_shared_bytes)) plan.slot_bytes *= 2;
  return plan;
}

LocalSlots::LocalSlots(int device_index, const StagingPlan& agreed)
    : device(device_index),
      plan(agreed),
      slots(device_memory(device, kStagingSlots * plan.slot_bytes)) {}

ProcessStaging::ProcessStaging(const LocalSlots& own, const pyringar::Segment& segment, int rank,
                               const PeerWatch& host, std::span<const StagingHandles> all)
    : own_(own),
      segment_(segment),
      rank_(rank),
      words_(own.device, &segment.device(0), segment.devices_bytes()),
      last_reduced_(segment.device(rank).reduced.value.load()),
      probe_stream_(own.device),
      last_call_(own.device),
      watch_(std::make_unique<DeviceWatch>(segment, rank, host)) {
  for (int r = 0; r < static_cast<int>(all.size()); ++r) {
    if (r == rank) {
      bases_.push_back(as<std::byte>(own.slots));
      continue;
    }
    peers_.push_back(open(r, all[static_cast<std::size_t>(r)]));
    bases_.push_back(static_cast<std::byte*>(peers_.back().slots.get()));
  }
}

ProcessStaging::Peer ProcessStaging::open(int rank, const StagingHandles& theirs) const {
  try {
    return {rank, map_memory(own_.device, theirs.slots)};
  } catch (const Error& error) {
    const bool is_own_process = segment_.line(rank).process.pid == segment_.line(rank_).process.pid;
    const char* hint =
        is_own_process
            ? "; both ranks are in one process, and CUDA cannot map memory in the process "
              "that exports it: use pyringar.Communicator for GPUs of one process"
        : !is_visible(theirs.gpu.data())
            ? "; that GPU is not visible in this process: let CUDA_VISIBLE_DEVICES name all ranks' "
              "GPUs in every process, and pass device= to each"
            : "";
    fail(error.kind(), "memory of rank ", segment_.line(rank).global_rank, " on GPU ",
         theirs.gpu.data(), " cannot be mapped: ", error.what(), hint);
  }
}

// The slot of message 0 holds this rank's probe, that of message 1 a copy of each peer's in turn.
void ProcessStaging::write_probe() {
  const OnDevice guard(own_.device);
  const BesideCaptures beside;
  const std::size_t words = std::min(kMostProbeWords, plan().slot_bytes / sizeof(std::uint32_t));
  const std::vector<std::uint32_t> pattern = pattern_of(rank_, words);
  const cudaStream_t stream = probe_stream_.get();
  check(cudaMemcpyAsync(slot(rank_, 0), pattern.data(), words * sizeof(std::uint32_t),
                        cudaMemcpyDefault, stream),
        "cudaMemcpyAsync", own_.device);
  words_.write_word(line(rank_).probe.value, kProbed, stream);
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize", own_.device);
}

std::string ProcessStaging::check_probes() {
  const OnDevice guard(own_.device);
  const BesideCaptures beside;
  const std::size_t num_words =
      std::min(kMostProbeWords, plan().slot_bytes / sizeof(std::uint32_t));
  const cudaStream_t stream = probe_stream_.get();
  for (const Peer& peer : peers_) {
    // The peer wrote its word before the barrier. If this host cannot see it, streams would hang.
    const Word& word = line(peer.rank).probe.value;
    if (word.load(std::memory_order_acquire) != kProbed) {
      return join("the host does not see a write of the GPU of rank ",
                  segment_.line(peer.rank).global_rank);
    }
    words_.await_word(word, kProbed, stream);
    // Copy the peer's probe with a kernel, as calls do, and compare it on the host.
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
      return join("cuda:", own_.device, " reads ", *differs.first, " from word ",
                  differs.first - found.begin(), " of the memory of rank ",
                  segment_.line(peer.rank).global_rank, ", expected ", *differs.second);
    }
  }
  return {};
}

bool ProcessStaging::has_failed() const {
  try {
    last_call_.is_done();
    return false;
  } catch (const Error&) {
    return true;
  }
}

StagedCall::StagedCall(const ProcessStaging& staging, std::uint32_t last, cudaStream_t stream)
    : staging_(staging), last_(last), stream_(stream) {
  staging_.last_call_.make_wait(stream, staging_.own_.device);
  staging_.watch_->begin(last);
}

void StagedCall::end() {
  is_open_ = false;
  // Exchanges do not write `reduced`, so it may lag too far. No rank waits for this write.
  const bool is_far_behind = !reached(staging_.last_reduced_, last_ - kMostBehind);
  if (is_far_behind) staging_.write_reduced(last_, stream_);
  // Write `finished` before the record: afterwards the next call may write it on another stream.
  staging_.words_.write_word(staging_.line(staging_.rank_).finished.value, last_, stream_);
  staging_.last_call_.record(stream_);
}

StagedCall::~StagedCall() {
  if (!is_open_) return;
  try {
    end();
  } catch (const Error&) {  // the device has failed and does not report it
  }
}

}  // namespace pyringar::cuda
