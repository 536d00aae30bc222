// group: meeting, one call, and who frees what when.
//
// Tests     tests/cpp/cuda_processes, tests/test_cuda_processes.py

#include "cuda_process/group.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "core/error.h"

namespace pyringar {

namespace {

using namespace std::chrono_literals;

// How long close() looks whether the others close too, before it leaves the slots for later.
constexpr auto kPatienceOfClose = 200ms;

// Slots of closed groups that others may still read.
struct Leftovers {
  struct Entry {
    std::shared_ptr<ProcessGroup> host;  // its segment says who has left
    std::shared_ptr<cuda::OwnStaging> own;
    std::unique_ptr<cuda::ProcessStaging> staging;  // only where the device never came to an end
  };
  std::mutex mutex;
  std::vector<Entry> entries;

  static Leftovers& get() {
    static auto* leftovers = new Leftovers;  // never destroyed: CUDA may be gone by then
    return *leftovers;
  }
};

bool all_others_are_gone(const ProcessGroup& group) {
  for (int rank = 0; rank < group.world_size(); ++rank) {
    if (rank == group.rank()) continue;
    const RankLine& line = group.segment().line(rank);
    const auto state = static_cast<RankState>(line.state.load(std::memory_order_acquire));
    if (state == RankState::kJoined && is_alive(line.process)) return false;
  }
  return true;
}

void free_leftovers() {
  Leftovers& leftovers = Leftovers::get();
  const std::lock_guard<std::mutex> lock(leftovers.mutex);
  std::erase_if(leftovers.entries, [](const Leftovers::Entry& entry) {
    return !entry.host->forked() && entry.staging == nullptr && all_others_are_gone(*entry.host);
  });
}

}  // namespace

// What ranks tell each other while they connect.
struct CudaProcessGroup::Outcome {
  cuda::StagingHandles handles{};
  ErrorKind kind = ErrorKind::kState;
  std::array<char, 500> error{};  // empty: all is well

  void set_error(ErrorKind k, const std::string& text) {
    kind = k;
    std::memcpy(error.data(), text.data(), std::min(text.size(), error.size() - 1));
  }
  // Runs a step; what it throws goes to all ranks.
  template <typename Step>
  void attempt(Step&& step) {
    if (error[0] != '\0') return;
    try {
      step();
    } catch (const Error& failure) {
      set_error(failure.kind(), failure.what());
    }
  }
};

CudaProcessGroup::CudaProcessGroup(SharedMemory memory, const Segment& segment, int rank,
                                   int device, CudaProcessOptions options)
    : device_(device),
      options_(options),
      host_(std::make_shared<ProcessGroup>(
          std::move(memory), segment, rank,
          ProcessGroupOptions{options.timeout, false, true, options.on_nap})) {}

CudaProcessGroup::~CudaProcessGroup() { close(); }

void CudaProcessGroup::exchange(const Outcome& own, std::vector<Outcome>& all) {
  static_assert(std::is_trivially_copyable_v<Outcome>);
  Outcome input = own;
  ProcessCall call;
  call.kind = CallKind::kAllGather;
  call.inputs.push_back({reinterpret_cast<std::byte*>(&input), sizeof input, DType::kUInt8});
  call.outputs.push_back(
      {reinterpret_cast<std::byte*>(all.data()), all.size() * sizeof(Outcome), DType::kUInt8});
  host_->run(call);
  raise_first(own, all);
}

void CudaProcessGroup::raise_first(const Outcome& own, const std::vector<Outcome>& all) const {
  if (own.error[0] != '\0') fail(own.kind, own.error.data());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const Outcome& other = all[rank];
    if (other.error[0] == '\0') continue;
    const RankLine& line = host_->segment().line(static_cast<int>(rank));
    const bool is_known = other.kind == ErrorKind::kCuda || other.kind == ErrorKind::kUnsupported;
    const std::string text(other.error.data(), strnlen(other.error.data(), other.error.size()));
    fail(is_known ? other.kind : ErrorKind::kState, "rank ", rank, " (process ", line.process.pid,
         ") cannot take part: ", text);
  }
}

void CudaProcessGroup::connect() {
  free_leftovers();
  std::vector<Outcome> all(static_cast<std::size_t>(host_->world_size()));
  Outcome own;
  own.attempt([&] {
    own_ = std::make_shared<cuda::OwnStaging>(device_, options_.slot_bytes);
    if (host_->world_size() > 1) own.handles = own_->handles();
    stream_ = std::make_unique<cuda::Stream>(device_);
  });
  exchange(own, all);
  own.attempt([&] {
    std::vector<cuda::StagingHandles> handles;
    for (const Outcome& outcome : all) handles.push_back(outcome.handles);
    handles[static_cast<std::size_t>(host_->rank())].slot_bytes = options_.slot_bytes;
    staging_ = std::make_unique<cuda::ProcessStaging>(*own_, host_->rank(), handles);
    staging_->write_probe();
  });
  exchange(own, all);
  own.attempt([&] {
    const std::string wrong = staging_->look_at_probes();
    if (!wrong.empty()) {
      own.set_error(ErrorKind::kUnsupported,
                    join("memory that processes share does not arrive: ", wrong));
    }
  });
  exchange(own, all);
}

void CudaProcessGroup::check_connected() const {
  host_->check_usable();
  if (stream_ == nullptr) fail(ErrorKind::kState, "this communicator has not been connected");
}

void CudaProcessGroup::check_not_captured(const ProcessCall& call, cudaStream_t stream) const {
  if (!cuda::is_capturing(stream, device_)) return;
  fail(
      ErrorKind::kUnsupported, call_name(call.kind),
      ": ranks in processes of their own meet on the host in every call, which a CUDA graph cannot "
      "capture; call it outside of the graph, or drive all GPUs from one process "
      "(pyringar.Communicator)");
}

// -- one call -------------------------------------------------------------------------------------

ProcessPlan CudaProcessGroup::plan(std::size_t bytes) const {
  // Two ranks would read as much from each other either way.
  const bool is_exchange = host_->world_size() <= 2 || bytes <= options_.exchange_bytes;
  const std::size_t slots = (bytes + options_.slot_bytes - 1) / options_.slot_bytes;
  return {is_exchange ? ProcessAlgorithm::kExchange : ProcessAlgorithm::kDirect,
          std::max<std::size_t>(1, slots)};
}

bool CudaProcessGroup::enqueue(const ProcessCall& call, ProcessRank& self, cudaStream_t stream) {
  const auto start = Clock::now();
  const ProcessAlgorithm algorithm = call.kind == CallKind::kAllReduce
                                         ? plan(call.bytes()).algorithm
                                         : ProcessAlgorithm::kExchange;
  const bool is_direct = algorithm == ProcessAlgorithm::kDirect;
  begin_call(call, algorithm, self, false);
  const std::lock_guard<std::mutex> staging_lock(staging_mutex_);
  if (staging_ == nullptr) fail_closed();
  if (!cuda::run_staged(call, is_direct, self, *staging_, stream)) {
    if (!self.lies_otherwise) return false;
    fail(ErrorKind::kUnsupported, call_name(call.kind),
         ": the ranks' tensors lie in different strides, which ranks in processes of their own "
         "cannot mix on GPUs; pass .contiguous() ones");
  }
  const bool is_alike = call.kind != CallKind::kReduceScatter && call.kind != CallKind::kBarrier;
  if (options_.checks_digests && is_alike && !digests_agree(call, self, stream)) return false;
  const std::lock_guard<std::mutex> lock(stats_mutex_);
  stats_.add(algorithm, call.bytes(), Clock::now() - start);
  return true;
}

// Ranks meet without events here, so their devices have to be done with what was before.
bool CudaProcessGroup::digests_agree(const ProcessCall& call, ProcessRank& self,
                                     cudaStream_t stream) const {
  const cuda::OnDevice guard(device_);
  std::vector<std::vector<std::byte>> copies;
  std::vector<TensorSpan> spans;
  for (const TensorSpan& span : call.outputs) {
    copies.emplace_back(span.bytes());
    spans.push_back({copies.back().data(), span.numel, span.dtype});
    if (span.bytes() == 0) continue;
    cuda::check(
        cudaMemcpyAsync(copies.back().data(), span.data, span.bytes(), cudaMemcpyDefault, stream),
        "cudaMemcpyAsync", device_);
  }
  cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize", device_);
  return compare_digests(digest_of(spans, self.watch), self);
}

void CudaProcessGroup::run(const ProcessCall& call, cudaStream_t stream) {
  check_connected();
  check_not_captured(call, stream);
  host_->run_program([&](ProcessRank& self) { return enqueue(call, self, stream); });
}

CudaProcessGroup::Submitted CudaProcessGroup::submit(ProcessCall call, cudaStream_t after) {
  check_connected();
  check_not_captured(call, after);
  auto ready = std::make_shared<const cuda::Event>(device_);
  auto done = std::make_shared<const cuda::Event>(device_);
  ready->record(after);
  auto shared = std::make_shared<const ProcessCall>(std::move(call));
  auto enqueued = host_->submit_program(
      [this, ready, done, shared](ProcessRank& self) {
        ready->make_wait(stream_->get(), device_);
        if (!enqueue(*shared, self, stream_->get())) return false;
        done->record(stream_->get());
        return true;
      },
      shared);
  return {std::move(enqueued), std::move(done)};
}

ProcessStats CudaProcessGroup::stats() {
  host_->check_not_forked();
  const std::lock_guard<std::mutex> lock(stats_mutex_);
  return stats_;
}

// -- the end --------------------------------------------------------------------------------------

// False: a device that was left waiting, by a rank that died, say.
bool CudaProcessGroup::wait_until_idle() const {
  const auto start = Clock::now();
  try {
    while (!staging_->is_idle()) {
      if (Clock::now() - start > options_.timeout) return false;
      std::this_thread::sleep_for(100us);
    }
    return true;
  } catch (const Error&) {
    return true;  // the device has failed: nothing runs there any more
  }
}

bool CudaProcessGroup::close(Leaving leaving) {
  if (!host_->end_calls(leaving)) return false;
  const std::lock_guard<std::mutex> lock(close_mutex_);
  if (is_closed_) return true;
  is_closed_ = true;
  bool is_idle = true;
  {
    const std::lock_guard<std::mutex> staging_lock(staging_mutex_);
    is_idle = staging_ == nullptr || wait_until_idle();
    // Unmapped before the others hear that this rank has left: then they free what it mapped.
    if (is_idle) staging_ = nullptr;
  }
  host_->close();
  stream_ = nullptr;
  const auto start = Clock::now();
  while (own_ != nullptr && is_idle && !all_others_are_gone(*host_) &&
         Clock::now() - start < kPatienceOfClose) {
    std::this_thread::sleep_for(1ms);
  }
  if (own_ != nullptr && !(is_idle && all_others_are_gone(*host_))) {
    Leftovers& leftovers = Leftovers::get();
    const std::lock_guard<std::mutex> entries_lock(leftovers.mutex);
    leftovers.entries.push_back({host_, own_, std::move(staging_)});
  }
  own_ = nullptr;
  free_leftovers();
  return true;
}

}  // namespace pyringar
