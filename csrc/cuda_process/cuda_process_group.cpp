// cuda_process_group: connects the ranks, enqueues calls, and frees slots.
#include "cuda_process/cuda_process_group.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "core/error.h"
#include "cuda/folds.h"
#include "process/staged_engines.h"

namespace pyringar {

namespace cuda {

namespace {

constexpr std::size_t kSliceBytes = 256;

// Slots on GPUs. The stream's write of a word is enqueued before the host counter is set, the
// stream's wait after the host's wait.
class StreamMemory : public StagedCounters {
 public:
  static constexpr std::size_t kChunkAlignment = 16;

  StreamMemory(const Fold& fold, ProcessRank& self, const ProcessStaging& staging,
               cudaStream_t stream)
      : StagedCounters(self),
        fold_(fold),
        staging_(staging),
        base_(self.messages),
        stream_(stream),
        rank_(self.rank) {}

  void announce(std::uint32_t n) {
    staging_.write_announced(n, stream_);
    StagedCounters::announce(n);
  }
  bool wait_announced(std::uint32_t n) {
    if (!StagedCounters::wait_announced(n)) return false;
    staging_.await_announced(n, stream_);
    return true;
  }
  void publish_reduced(std::uint32_t n) {
    // for the base message, only the host counter is set
    if (n != base_) staging_.write_reduced(n, stream_);
    StagedCounters::publish_reduced(n);
  }
  bool wait_reduced(std::uint32_t n) {
    if (!StagedCounters::wait_reduced(n)) return false;
    staging_.await_reduced(n, stream_);
    return true;
  }

 protected:
  std::byte* slot(int rank, std::uint32_t n) const { return staging_.slot(rank, n); }
  std::byte* own_slot(std::uint32_t n) const { return slot(rank_, n); }
  Range slice_of(Range piece, int owner) const {
    const auto [first, last] = piece;
    // Kernels of ranks that share a GPU run one after the other, so rank 0 reduces the whole piece.
    if (staging_.plan().shares_gpu) return {first, owner == 0 ? last : first};
    return slice_in_units(piece, world_size_, owner, kSliceBytes);
  }
  Folds to_slot() const { return Folds::copies(); }
  Folds from_slot() const { return Folds::copies(); }
  Folds folds(int num_destinations, std::size_t) const {
    return {fold_, world_size_, num_destinations};
  }
  void launch(const Folds& folds) const { folds.launch(staging_.device(), stream_); }

 private:
  const Fold& fold_;
  const ProcessStaging& staging_;
  const std::uint32_t base_;
  const cudaStream_t stream_;
  const int rank_;
};

// Enqueue a call. The host waits for the other hosts, not for devices. False: a rank failed, or
// layouts differ; the work enqueued so far still runs. If all ranks share a GPU, rank 0 reduces all
// slices: 2k - 1 kernels per piece instead of 3k.
bool run_staged(const Collective& call, bool is_direct, ProcessRank& self,
                const ProcessStaging& staging, cudaStream_t stream) {
  const StreamMemory memory(call.fold, self, staging, stream);
  const std::size_t slot_bytes = staging.plan().slot_bytes;
  const auto run = [&](auto engine, std::size_t num_pieces) {
    const StagedProgram program{self.messages, num_pieces};
    self.messages += static_cast<std::uint32_t>(num_pieces);
    StagedCall staged(staging, self.messages, stream);
    bool is_done = false;
    if constexpr (requires { engine.reduce(0, 0); }) {
      is_done =
          is_direct ? run_staged_direct(engine, program) : run_staged_exchange(engine, program);
    } else {
      is_done = run_staged_exchange(engine, program);
    }
    staged.end();
    return is_done;
  };
  if (call.kind == CallKind::kBarrier) return run(EmptyEngine(memory), 1);
  if (call.kind != CallKind::kAllReduce) {
    const ChunkEngine shares(memory, call, slot_bytes);
    return run(shares, shares.num_pieces());
  }
  self.flat.view(call);
  return run(ReduceEngine(memory, is_direct, slot_bytes), pieces_of(self.flat.bytes(), slot_bytes));
}

}  // namespace

}  // namespace cuda

namespace {

using namespace std::chrono_literals;

// How long close() waits for the other ranks to close. Afterwards the slots stay allocated.
constexpr auto kPatienceOfClose = 200ms;

// Slots of closed groups that other ranks may still read.
struct UnfreedSlots {
  struct Entry {
    std::shared_ptr<ProcessGroup> host;  // its segment shows which ranks have exited
    std::shared_ptr<cuda::LocalSlots> own;
    std::unique_ptr<cuda::ProcessStaging> staging;  // null once the GPU has run all calls
  };
  std::mutex mutex;
  std::vector<Entry> entries;

  static UnfreedSlots& get() {
    static auto* unfreed = new UnfreedSlots;  // leaked: CUDA may be unloaded before destructors run
    return *unfreed;
  }
};

bool all_peers_have_closed(const ProcessGroup& group) {
  for (int rank = 0; rank < group.world_size(); ++rank) {
    if (rank == group.rank()) continue;
    const RankLine& line = group.segment().line(rank);
    if (line.state.load() == RankState::kJoined && is_alive(line.process)) return false;
  }
  return true;
}

// True for errors after which the caller knows that pending results may be undefined.
bool is_about_peers(const Error& error) {
  return error.kind() == ErrorKind::kPeerLost || error.kind() == ErrorKind::kTimeout;
}

void free_slots() {
  UnfreedSlots& unfreed = UnfreedSlots::get();
  const std::lock_guard<std::mutex> lock(unfreed.mutex);
  for (UnfreedSlots::Entry& entry : unfreed.entries) {
    if (entry.host->forked() || entry.staging == nullptr || !entry.staging->is_idle()) continue;
    entry.staging = nullptr;
    entry.host->close();
  }
  std::erase_if(unfreed.entries, [](const UnfreedSlots::Entry& entry) {
    return !entry.host->forked() && entry.staging == nullptr && all_peers_have_closed(*entry.host);
  });
}

// True if the GPU still runs calls of this closed group.
bool is_left_running(const ProcessGroup& group) {
  UnfreedSlots& unfreed = UnfreedSlots::get();
  const std::lock_guard<std::mutex> lock(unfreed.mutex);
  return std::any_of(unfreed.entries.begin(), unfreed.entries.end(),
                     [&](const UnfreedSlots::Entry& entry) {
                       return entry.host.get() == &group && entry.staging != nullptr;
                     });
}

}  // namespace

// The data that ranks exchange while they connect.
struct CudaProcessGroup::ConnectStatus {
  cuda::StagingHandles handles{};
  ErrorKind kind = ErrorKind::kState;
  std::array<char, 500> error{};  // empty: no error

  template <typename Step>
  void attempt(Step&& step) {
    if (error[0] != '\0') return;
    try {
      step();
    } catch (const Error& failure) {
      kind = failure.kind();
      std::strncpy(error.data(), failure.what(), error.size() - 1);
    }
  }
};

CudaProcessGroup::CudaProcessGroup(SharedMemory memory, const Segment& segment, int rank,
                                   int device, CudaProcessOptions options)
    : device_(device),
      options_(options),
      host_(std::make_shared<ProcessGroup>(
          std::move(memory), segment, rank,
          ProcessGroupOptions{.timeout = options.timeout, .on_nap = options.on_nap})),
      last_(host_->segment().device(rank).finished.value.load()) {}

CudaProcessGroup::~CudaProcessGroup() {
  try {
    close();
  } catch (const Error&) {  // users who need the error call close()
  }
}

void CudaProcessGroup::exchange(const ConnectStatus& own, std::vector<ConnectStatus>& all) {
  static_assert(std::is_trivially_copyable_v<ConnectStatus>);
  ConnectStatus input = own;
  Collective call;
  call.kind = CallKind::kAllGather;
  call.world_size = host_->world_size();
  call.reserve_local(1);
  call.add_local(&input, all.data(), all.size() * sizeof(ConnectStatus), DType::kUInt8);
  host_->run(call);
  raise_first(own, all);
}

void CudaProcessGroup::raise_first(const ConnectStatus& own,
                                   const std::vector<ConnectStatus>& all) const {
  if (own.error[0] != '\0') fail(own.kind, own.error.data());
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const ConnectStatus& other = all[rank];
    if (other.error[0] == '\0') continue;
    const bool is_known = other.kind == ErrorKind::kCuda || other.kind == ErrorKind::kUnsupported;
    const std::string text(other.error.data(), strnlen(other.error.data(), other.error.size()));
    fail(is_known ? other.kind : ErrorKind::kState, host_->watch().name_of(static_cast<int>(rank)),
         " cannot join: ", text);
  }
}

std::vector<cuda::StagingHandles> CudaProcessGroup::handles_of(
    const std::vector<ConnectStatus>& all) {
  std::vector<cuda::StagingHandles> handles;
  for (const ConnectStatus& status : all) handles.push_back(status.handles);
  return handles;
}

void CudaProcessGroup::connect() {
  free_slots();
  std::vector<ConnectStatus> all(static_cast<std::size_t>(host_->world_size()));
  ConnectStatus own;
  const auto on_all_ranks = [&](auto&& step) {
    own.attempt(step);
    exchange(own, all);
  };
  on_all_ranks([&] {
    stream_ = std::make_unique<cuda::Stream>(device_);
    own.handles = cuda::describe_gpu(device_);
  });
  plan_ = cuda::plan_staging(handles_of(all), options_.slot_bytes, options_.most_shared_slot_bytes);
  on_all_ranks([&] {
    own_ = std::make_shared<cuda::LocalSlots>(device_, plan_);
    if (host_->world_size() > 1) own.handles.slots = cuda::ipc_handle(own_->slots);
  });
  on_all_ranks([&] {
    staging_ = std::make_unique<cuda::ProcessStaging>(*own_, host_->segment(), host_->rank(),
                                                      host_->watch(), handles_of(all));
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    abortable_ = staging_.get();
    staging_->write_probe();
  });
  on_all_ranks([&] {
    const std::string wrong = staging_->check_probes();
    if (wrong.empty()) return;
    fail(ErrorKind::kUnsupported, "memory shared with other processes fails a test: ", wrong);
  });
}

void CudaProcessGroup::check_connected() const {
  host_->check_usable();
  if (stream_ == nullptr) fail(ErrorKind::kState, "this communicator has not been connected");
}

void CudaProcessGroup::check_not_captured(const Collective& call, cudaStream_t stream) const {
  if (!cuda::is_capturing(stream, device_)) return;
  fail(ErrorKind::kUnsupported, call_name(call.kind),
       ": ranks in processes synchronize on the host in every call, which a CUDA graph cannot "
       "capture; "
       "call it outside of the graph, or drive all GPUs from one process (pyringar.Communicator)");
}

ProcessPlan CudaProcessGroup::plan(std::size_t bytes) const {
  // With two ranks on two GPUs, an exchange reads no more from the peer than a direct call.
  const int most_exchange = plan_.shares_gpu ? 1 : 2;
  const bool is_exchange = host_->world_size() <= most_exchange || bytes <= options_.exchange_bytes;
  const std::size_t slots = (bytes + plan_.slot_bytes - 1) / plan_.slot_bytes;
  return {is_exchange ? ProcessAlgorithm::kExchange : ProcessAlgorithm::kDirect,
          std::max<std::size_t>(1, slots)};
}

bool CudaProcessGroup::enqueue(const Collective& call, ProcessRank& self, cudaStream_t stream) {
  const cuda::ProfiledRange range(call_name(call.kind));
  const auto start = Clock::now();
  const ProcessAlgorithm algorithm =
      call.kind == CallKind::kAllReduce ? plan(call.bytes).algorithm : ProcessAlgorithm::kExchange;
  const bool is_direct = algorithm == ProcessAlgorithm::kDirect;
  begin_call(call, self, false);
  const std::lock_guard<std::mutex> staging_lock(staging_mutex_);
  if (staging_ == nullptr) fail_closed();
  if (!cuda::run_staged(call, is_direct, self, *staging_, stream)) {
    if (!self.layouts_differ) return false;
    fail(ErrorKind::kUnsupported, call_name(call.kind),
         ": the ranks' tensors have different strides, which ranks in processes do not support on "
         "GPUs; pass .contiguous() tensors");
  }
  last_.store(staging_->last());
  const std::lock_guard<std::mutex> lock(stats_mutex_);
  stats_.add(algorithm, call.bytes, Clock::now() - start);
  return true;
}

void CudaProcessGroup::run(const Collective& call, cudaStream_t stream) {
  check_connected();
  check_not_captured(call, stream);
  try {
    host_->run_program([&](ProcessRank& self) { return enqueue(call, self, stream); });
  } catch (const Error& error) {
    has_reported_.store(has_reported_.load() || is_about_peers(error));
    throw;
  }
}

CudaProcessGroup::Submitted CudaProcessGroup::submit(Collective call, cudaStream_t after) {
  check_connected();
  check_not_captured(call, after);
  auto ready = std::make_shared<const cuda::Event>(device_);
  auto done = std::make_shared<const cuda::Event>(device_);
  ready->record(after);
  auto last = std::make_shared<std::uint32_t>(last_.load());
  auto shared = std::make_shared<const Collective>(std::move(call));
  auto enqueued = host_->submit_program(
      [this, ready, done, last, shared](ProcessRank& self) {
        // New threads have device 0 current. Switch here once, so that the calls below need not.
        cuda::check(cudaSetDevice(device_), "cudaSetDevice", device_);
        ready->make_wait(stream_->get(), device_);
        bool is_enqueued = false;
        cuda::run_and_always([&] { is_enqueued = enqueue(*shared, self, stream_->get()); },
                             [&] { done->record(stream_->get()); });
        if (is_enqueued) *last = last_.load();
        return is_enqueued;
      },
      shared);
  return {std::move(enqueued), std::move(done), std::move(last)};
}

CudaProcessGroup::Submitted CudaProcessGroup::enqueued(cudaStream_t stream) {
  auto done = std::make_shared<cuda::Event>(device_);
  done->record(stream);
  return {nullptr, std::move(done), std::make_shared<std::uint32_t>(last_.load())};
}

Error CudaProcessGroup::void_error() const {
  try {
    host_->watch().check_peers({});
  } catch (const Error& error) {
    const bool is_late = error.kind() == ErrorKind::kTimeout;
    return {is_late ? ErrorKind::kTimeout : ErrorKind::kPeerLost,
            join("results of calls that had returned are undefined: ", error.what())};
  }
  return {ErrorKind::kPeerLost, "results of calls that had returned are undefined"};
}

std::exception_ptr CudaProcessGroup::failure_of(const Submitted& work) {
  if (work.enqueued != nullptr) {
    if (!work.enqueued->is_completed()) return nullptr;
    if (std::exception_ptr refused = work.enqueued->exception()) {
      try {
        std::rethrow_exception(refused);
      } catch (const Error& error) {
        has_reported_.store(has_reported_.load() || is_about_peers(error));
      } catch (...) {  // an exception of a Python step
      }
      return refused;
    }
  }
  if (!is_void(host_->segment(), *work.last)) return nullptr;
  has_reported_.store(true);
  return std::make_exception_ptr(void_error());
}

void CudaProcessGroup::raise_unreported() {
  if (has_reported_.load() || !is_void(host_->segment(), last_.load())) return;
  has_reported_.store(true);
  throw void_error();
}

ProcessStats CudaProcessGroup::stats() {
  host_->check_not_forked();
  const std::lock_guard<std::mutex> lock(stats_mutex_);
  return stats_;
}

// Return false if the GPU makes no progress within `patience`, perhaps because of other work. Lost
// or late ranks are not the reason, since DeviceWatch has ended waits for them.
bool CudaProcessGroup::wait_until_idle(std::chrono::nanoseconds patience) const {
  auto moved = Clock::now();
  std::uint64_t progress = staging_->progress();
  while (!staging_->is_idle()) {
    const auto now = Clock::now();
    const std::uint64_t seen = staging_->progress();
    if (seen != progress) moved = now;
    progress = seen;
    if (now - moved > patience) return false;
    if (staging_->has_failed()) return true;
    options_.on_nap();
    std::this_thread::sleep_for(100us);
  }
  return true;
}

// Report the abort to all ranks, then end this rank's stream waits: host calls may block on them.
void CudaProcessGroup::release_streams() {
  if (host_->forked()) return;
  host_->abort("has aborted the group");
  const std::lock_guard<std::mutex> lock(abort_mutex_);
  if (abortable_ != nullptr) abortable_->abort();
}

bool CudaProcessGroup::close(CloseMode mode) {
  if (mode == CloseMode::kAborting) release_streams();
  if (!host_->end_calls(mode)) return false;
  const CallLock::Held held = close_lock_.acquire(options_.on_nap);
  if (!is_closed_) {
    release(mode);
    is_closed_ = true;
  }
  free_slots();
  const bool is_idle = !is_left_running(*host_);
  if (mode != CloseMode::kAfterCalls) {
    has_reported_.store(true);  // the caller chose not to wait for the GPU
  } else if (!is_idle && !has_reported_.exchange(true)) {
    const PeerWatch& watch = host_->watch();
    fail(ErrorKind::kTimeout, "close: the GPU of ", watch.name_of(host_->rank()),
         " has not finished its calls, without progress for ",
         std::chrono::duration<double>(watch.timeout()).count(),
         " s; their results may be undefined, and their tensors stay in use until it has");
  } else {
    raise_unreported();
  }
  return is_idle;
}

void CudaProcessGroup::release(CloseMode mode) {
  const auto patience =
      mode == CloseMode::kAborting ? kPatienceOfClose : host_->watch().timeout() + kPatienceOfClose;
  bool is_idle = true;
  {
    const std::lock_guard<std::mutex> staging_lock(staging_mutex_);
    is_idle = staging_ == nullptr || wait_until_idle(patience);
    const std::lock_guard<std::mutex> lock(abort_mutex_);
    abortable_ = nullptr;
    // Unmap the other ranks' slots before this rank is marked as closed: they free the slots then.
    if (is_idle) staging_ = nullptr;
  }
  if (is_idle) {
    host_->close();
  } else {
    tell_failure(host_->segment(), ErrorKind::kTimeout,
                 join(host_->watch().name_of(host_->rank()),
                      " has closed, and its GPU has not finished its calls"));
  }
  stream_ = nullptr;
  const auto start = Clock::now();
  while (own_ != nullptr && is_idle && !all_peers_have_closed(*host_) &&
         Clock::now() - start < kPatienceOfClose) {
    std::this_thread::sleep_for(1ms);
  }
  if (own_ != nullptr && !(is_idle && all_peers_have_closed(*host_))) {
    UnfreedSlots& unfreed = UnfreedSlots::get();
    const std::lock_guard<std::mutex> entries_lock(unfreed.mutex);
    unfreed.entries.push_back({host_, own_, std::move(staging_)});
  }
  own_ = nullptr;
}

}  // namespace pyringar
