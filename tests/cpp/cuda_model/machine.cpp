#include "machine.h"

#include <algorithm>

namespace pyringar::model {

Machine& Machine::get() {
  static auto* machine = new Machine;
  return *machine;
}

Host& host() {
  thread_local Host own;
  Machine& machine = Machine::get();
  if (own.id < 0) {
    static std::atomic<int> next{0};
    own.id = next++;
  }
  if (own.generation != machine.generation) {
    own.generation = machine.generation;
    own.device = 0;
    own.pushed.clear();
    own.mode = cudaStreamCaptureModeGlobal;
    own.in_between = own.before_launch = {};
  }
  return own;
}

Host::~Host() {
  if (!is_registered) return;
  const std::lock_guard lock(Machine::get().mutex);
  Machine::get().num_hosts -= 1;
}

Machine::IsAwaited on_device(int device) {
  return [device, process = host().process](const StreamState& stream) {
    return stream.process == process && (device == kAnyDevice || stream.device == device);
  };
}

int current_device() { return host().pushed.empty() ? host().device : host().pushed.back(); }

void Machine::start(std::uint64_t seed, const Options& how) {
  throw_pending();
  ++generation;
  peers = {};
  random = stress::Random(seed);
  options = how;
  now_ns = 1'000'000'000;
  running.clear();
  graph_runs.clear();
  streams.clear();
  null_streams.clear();
  captures.clear();
  host_clocks.clear();
  processes.clear();
  openings.clear();
  loaded.clear();
  words.clear();
  shadow = {};
  std::erase_if(memory, [](const auto& entry) { return entry.second.is_tensor; });
  CHECK(memory.empty(), memory.size(), " allocations are left, one of ",
        memory.begin()->second.bytes, " bytes");
}

void Interlude::run_if_due() {
  if (run == nullptr || calls_before-- > 0) return;
  const auto other = std::exchange(run, nullptr);
  std::exception_ptr failure;
  std::thread([&, process = host().process] {
    host().process = process;
    try {
      other();
    } catch (...) {
      failure = std::current_exception();
    }
  }).join();
  if (failure) std::rethrow_exception(failure);
}

void Machine::throw_pending() {
  if (!pending) return;
  const Broken broken = *pending;
  pending.reset();
  throw broken;
}

cudaError_t RuntimeCall::check_unsafe() const {
  return fault_ != cudaSuccess ? fault_ : error(machine_.check_unsafe_call());
}

RuntimeCall::RuntimeCall(Touches touches) : machine_(Machine::get()), lock_(machine_.mutex) {
  machine_.throw_pending();
  ProcessState& own = process();
  fault_ = own.fault;
  if (touches == Touches::kDevice) own.contexts.insert(current_device());
}

// -- clocks ---------------------------------------------------------------------------------------

Actor Machine::host_actor() const { return options.hosts_see_each_other ? -2 : -2 - host().id; }

Clock& Machine::host_clock() { return host_clocks[host_actor()]; }

const std::pair<const std::uintptr_t, Allocation>* Machine::allocation_of(std::uintptr_t address,
                                                                          std::size_t bytes) const {
  auto found = memory.upper_bound(address);
  const bool is_there =
      found != memory.begin() && (--found, address + bytes <= found->first + found->second.bytes);
  return is_there ? &*found : nullptr;
}

std::uintptr_t Machine::canonical(std::uintptr_t address, std::size_t bytes,
                                  const Epoch& now) const {
  const auto* found = allocation_of(address, bytes);
  if (found == nullptr) {
    throw Broken("freed",
                 join(now.what, " uses ", bytes, " bytes that are not allocated (any more)"));
  }
  return found->second.canonical + (address - found->first);
}

// Check the accesses of kernels only: the driver's copies reach any memory.
void Machine::check_reach(const StreamWork& work, const Access& access) {
  const auto* found = allocation_of(access.begin, access.bytes);
  if (found == nullptr || found->second.device == work.device) return;
  const Allocation& there = found->second;
  const bool is_enabled = processes.at(work.process).reached.count({work.device, there.device}) > 0;
  const char* why = there.device < 0 ? (there.is_tensor ? "which is pageable" : nullptr)
                    : !is_enabled    ? "without peer access"
                    : there.is_tensor && !peers.tensors_are_visible
                        ? "which its allocator does not share with peers"
                        : nullptr;
  if (why == nullptr) return;
  const std::string where = there.device < 0 ? "the host" : join("cuda:", there.device);
  throw Broken("peer",
               join(work.what, " on cuda:", work.device, " uses memory of ", where, ", ", why));
}

std::string Machine::user_of(std::uintptr_t begin, std::size_t bytes) const {
  const auto uses = [&](const StreamWork& work) {
    const ProcessState& process = processes.at(work.process);
    return process.is_alive && process.fault == cudaSuccess &&
           std::any_of(work.accesses.begin(), work.accesses.end(), [&](const Access& access) {
             return access.begin < begin + bytes && begin < access.begin + access.bytes;
           });
  };
  for (const Running& one : running) {
    if (uses(one.work)) return one.work.what;
  }
  for (const auto& stream : streams) {
    const auto found = std::find_if(stream->entries.begin(), stream->entries.end(), uses);
    if (found != stream->entries.end()) return found->what;
  }
  return "";
}

void Machine::note(const std::vector<Access>& accesses, const Epoch& now, const Clock& clock) {
  for (Access access : accesses) {
    if (access.bytes == 0) continue;
    access.begin = canonical(access.begin, access.bytes, now);
    if (access.touch == Touch::kFlags) continue;
    const std::string race = shadow.note(access, now, clock);
    if (!race.empty()) throw Broken("race", race);
  }
}

void Machine::note_host(const void* begin, std::size_t bytes, Touch touch, const char* what) {
  Clock& clock = host_clock();
  note({access(begin, bytes, touch)}, {host_actor(), clock.tick(host_actor()), what}, clock);
}

// -- streams --------------------------------------------------------------------------------------

StreamState* Machine::make_stream(int process, int device, bool is_blocking) {
  streams.push_back(std::make_unique<StreamState>(
      StreamState{process, device, is_blocking, num_actors++, random.bits()}));
  return streams.back().get();
}

StreamState* Machine::state_of(cudaStream_t stream) {
  if (stream != nullptr) return reinterpret_cast<StreamState*>(stream);
  const int process = host().process;
  StreamState*& found = null_streams[{process, current_device()}];
  if (found == nullptr) found = make_stream(process, current_device(), true);
  return found;
}

cudaError_t Machine::enqueue(StreamState* stream, StreamWork work) {
  if (stream->is_destroyed) throw Broken("order", work.what + " on a stream that is destroyed");
  if (!processes[stream->process].is_alive) return cudaSuccess;
  work.process = host().process;
  work.device = stream->device;
  work.from_host = host_clock();
  const bool is_null = stream == null_streams[{stream->process, stream->device}];
  if (stream->capture != nullptr) return add_node(stream, std::move(work));
  if (stream->is_blocking) {
    for (auto& other : streams) {
      const bool is_other_null = other.get() == null_streams[{stream->process, stream->device}];
      if (other.get() == stream || !other->is_blocking || other->process != stream->process ||
          other->device != stream->device || (!is_null && !is_other_null)) {
        continue;
      }
      if (other->capture != nullptr) {
        return invalidate(*other->capture, cudaErrorStreamCaptureImplicit);
      }
      const auto between = std::make_shared<EventState>(EventState{0, 1});
      StreamWork record{StreamWork::Kind::kRecord, "the default stream's order"};
      record.event = between;
      record.record = 1;
      record.ticket = next_id++;
      other->entries.push_back(record);
      record.kind = StreamWork::Kind::kWait;
      record.ticket = next_id++;
      stream->entries.push_back(record);
    }
  }
  work.ticket = next_id++;
  stream->entries.push_back(std::move(work));
  if (options.one_in > 0 && random.one_in(options.one_in)) step();
  return cudaSuccess;
}

unsigned Machine::places_left(int device) const {
  auto left = static_cast<unsigned>(kMultiprocessors * options.blocks_per_multiprocessor);
  for (const Running& one : running) {
    if (one.work.device == device) left -= std::min(left, one.grid->num_blocks());
  }
  return left;
}

bool Machine::can_begin(const StreamWork& work) const {
  switch (work.kind) {
    case StreamWork::Kind::kWait:
      return has_come_to(*work.event, work.record);
    case StreamWork::Kind::kAwaitWord:
      return static_cast<std::int32_t>(__atomic_load_n(work.word, __ATOMIC_ACQUIRE) - work.value) >=
             0;
    case StreamWork::Kind::kGrid:
      return places_left(work.device) >= work.launch.num_blocks;
    default:
      return work.kernel == nullptr || places_left(work.device) > 0;
  }
}

bool Machine::is_first(const StreamState& stream) const {
  if (processes.at(stream.process).is_held) return false;
  return !options.has_one_queue || std::none_of(streams.begin(), streams.end(), [&](const auto& o) {
    return o->process == stream.process && o->device == stream.device && !o->entries.empty() &&
           o->entries.front().ticket < stream.entries.front().ticket;
  });
}

std::vector<Machine::Candidate> Machine::candidates() {
  if (steps_left_-- <= 0) {
    steps_left_ = static_cast<int>(random.below(60));
    for (auto& stream : streams) stream->priority = random.bits();
  }
  std::vector<Candidate> found;
  for (auto& stream : streams) {
    const bool can = !stream->is_busy && !stream->entries.empty() && is_first(*stream) &&
                     can_begin(stream->entries.front());
    if (can) found.push_back({stream->priority, stream.get(), nullptr, 0, nullptr});
  }
  for (auto& run : graph_runs) {
    const std::vector<Node>& nodes = run->launch.graph->nodes;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      const auto is_done = [&](std::size_t before) { return run->state[before] == 2; };
      if (run->state[i] == 0 && can_begin(nodes[i].work) &&
          std::all_of(nodes[i].after.begin(), nodes[i].after.end(), is_done)) {
        found.push_back({random.bits(), nullptr, run.get(), i, nullptr});
      }
    }
  }
  for (Running& one : running) found.push_back({random.bits(), nullptr, nullptr, 0, &one});
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.priority > b.priority; });
  return found;
}

bool Machine::step() {
  for (const Candidate& candidate : candidates()) {
    if (take(candidate)) return true;  // false: all blocks of a grid wait
  }
  return false;
}

bool Machine::take(const Candidate& candidate) {
  if (candidate.running != nullptr) return run_grid(*candidate.running);
  if (candidate.graph != nullptr) {
    GraphRun& run = *candidate.graph;
    run.state[candidate.node] = 1;
    begin(run.launch.graph->nodes[candidate.node].work, run.stream, &run, candidate.node);
    return true;
  }
  StreamWork work = std::move(candidate.stream->entries.front());
  candidate.stream->entries.pop_front();
  begin(std::move(work), candidate.stream, nullptr, 0);
  return true;
}

void Machine::begin(StreamWork work, StreamState* stream, GraphRun* graph, std::size_t node) {
  const Actor actor = graph == nullptr ? stream->actor : graph->actors[node];
  Clock& clock = graph == nullptr ? stream->clock : graph->clocks[node];
  clock.join(graph == nullptr ? work.from_host : graph->launch.from_host);
  if (graph != nullptr) {
    clock.join(stream->clock);
    for (const std::size_t before : graph->launch.graph->nodes[node].after) {
      clock.join(graph->clocks[before]);
    }
  }
  run_work(work, clock, actor);
  if (work.kind == StreamWork::Kind::kGrid) {
    if (graph == nullptr) stream->is_busy = true;
    auto grid = std::make_unique<Grid>(work.launch, &now_ns);
    running.push_back({std::move(grid), std::move(work), stream, graph, node});
  } else if (work.kind == StreamWork::Kind::kGraph) {
    stream->is_busy = true;
    const std::size_t count = work.graph->nodes.size();
    auto run = std::make_unique<GraphRun>(
        GraphRun{stream, std::move(work), std::vector<int>(count), std::vector<Clock>(count), {}});
    for (std::size_t i = 0; i < count; ++i) run->actors.push_back(num_actors++);
    graph_runs.push_back(std::move(run));
    if (count == 0) end_graph(*graph_runs.back());
  } else if (graph != nullptr) {
    end_node(*graph, node);
  }
}

void Machine::run_work(const StreamWork& work, Clock& clock, Actor actor) {
  if (work.kind == StreamWork::Kind::kWait) return clock.join(work.event->clocks[work.record]);
  const Epoch now{actor, clock.tick(actor), work.what, clock.is_released()};
  if (work.kind == StreamWork::Kind::kAwaitWord) {
    const auto word = words.find(canonical(work.accesses[0].begin, sizeof work.value, now));
    const bool was_written =
        word != words.end() && static_cast<std::int32_t>(word->second.value - work.value) >= 0;
    if (!was_written) clock.release();
    return word != words.end() ? clock.join(word->second.clock) : void();
  }
  for (const Access& access : work.accesses) {
    if (work.kernel != nullptr && access.bytes > 0) check_reach(work, access);
  }
  note(work.accesses, now, clock);
  if (work.kind == StreamWork::Kind::kRun && work.run) work.run();
  if (work.kind == StreamWork::Kind::kRecord) work.event->clocks[work.record] = clock;
  if (work.kind == StreamWork::Kind::kWriteWord) {
    WordState& word = words[canonical(work.accesses[0].begin, sizeof work.value, now)];
    word.clock.join(clock);
    word.value = work.value;
    __atomic_store_n(work.word, work.value, __ATOMIC_RELEASE);
  }
}

bool Machine::run_grid(Running& one) {
  now_ns += 1000;
  const bool has_moved = one.grid->slice(random);
  if (!one.grid->is_done()) return has_moved;
  if (one.graph != nullptr) {
    end_node(*one.graph, one.node);
  } else {
    one.stream->is_busy = false;
  }
  std::erase_if(running, [&](const Running& other) { return &other == &one; });
  return true;
}

void Machine::end_node(GraphRun& run, std::size_t node) {
  run.state[node] = 2;
  const bool is_over =
      std::all_of(run.state.begin(), run.state.end(), [](int state) { return state == 2; });
  if (is_over) end_graph(run);
}

void Machine::end_graph(GraphRun& run) {
  for (const Clock& clock : run.clocks) run.stream->clock.join(clock);
  run.stream->is_busy = false;
  std::erase_if(graph_runs, [&](const auto& other) { return other.get() == &run; });
}

// -- waits of the host ----------------------------------------------------------------------------

std::string Machine::waiting() const {
  std::string text;
  for (const auto& stream : streams) {
    if (stream->entries.empty()) continue;
    const StreamWork& next = stream->entries.front();
    text += join("\n    process ", stream->process, ", cuda:", stream->device, ": ", next.what);
  }
  for (const Running& one : running) {
    text += join("\n    cuda:", one.work.device, ": blocks of ", one.work.what, " wait");
  }
  return text.empty() ? " no work is enqueued" : text;
}

void Machine::drain(Lock& lock, const char* what, const IsAwaited& is_awaited) {
  run_until(lock, what, [&] {
    return std::all_of(streams.begin(), streams.end(), [&](const auto& stream) {
      return !is_awaited(*stream) || (stream->entries.empty() && !stream->is_busy);
    });
  });
}

void Machine::wait_for(Lock& lock, const char* what, const IsAwaited& is_awaited) {
  drain(lock, what, is_awaited);
  for (const auto& stream : streams) {
    if (is_awaited(*stream)) host_clock().join_times(stream->clock);
  }
}

// A kernel's first use loads it, which "may require context synchronization", but orders nothing.
void Machine::load(Lock& lock, const void* kernel, int device) {
  if (options.loads_eagerly || !loaded.insert({kernel, device}).second) return;
  drain(lock, "loading a kernel", on_device(device));
}

// -- functions for tests --------------------------------------------------------------------------

void start(std::uint64_t seed, const Options& options) {
  const std::lock_guard lock(Machine::get().mutex);
  Machine::get().start(seed, options);
}

void run_to_end() {
  Machine& machine = Machine::get();
  Lock lock(machine.mutex);
  machine.throw_pending();
  machine.wait_for(lock, "the end of a test", [](const StreamState&) { return true; });
}

void become_process(int process) {
  Host& own = host();
  const std::lock_guard lock(Machine::get().mutex);
  if (!std::exchange(own.is_registered, true)) Machine::get().num_hosts += 1;
  own.process = process;
  Machine::get().processes[process];
}

void in_between(int num_calls, std::function<void()> other_thread) {
  host().in_between = {std::move(other_thread), num_calls};
}

void before_launch(int num_launches, std::function<void()> other_thread) {
  host().before_launch = {std::move(other_thread), num_launches};
}

void meet_hosts() {
  Machine& machine = Machine::get();
  const std::lock_guard lock(machine.mutex);
  machine.host_clock();
  Clock all;
  for (const auto& [actor, clock] : machine.host_clocks) all.join(clock);
  for (auto& [actor, clock] : machine.host_clocks) clock.join(all);
}

void host_reads(const void* memory, std::size_t bytes) {
  const std::lock_guard lock(Machine::get().mutex);
  Machine::get().note_host(memory, bytes, Touch::kRead, "the host");
}

void host_writes(const void* memory, std::size_t bytes) {
  const std::lock_guard lock(Machine::get().mutex);
  Machine::get().note_host(memory, bytes, Touch::kWrite, "the host");
}

void fault(int device, cudaError_t error) {
  const std::lock_guard lock(Machine::get().mutex);
  ProcessState& process = Machine::get().processes[host().process];
  if (process.contexts.count(device) > 0) process.fault = error;
}

std::set<int> contexts() {
  const std::lock_guard lock(Machine::get().mutex);
  return Machine::get().processes[host().process].contexts;
}

long num_allocations() {
  const std::lock_guard lock(Machine::get().mutex);
  return std::count_if(Machine::get().memory.begin(), Machine::get().memory.end(),
                       [](const auto& entry) { return !entry.second.is_tensor; });
}

long num_events() {
  const std::lock_guard lock(Machine::get().mutex);
  long all = 0;
  for (const auto& [process, state] : Machine::get().processes) {
    if (state.is_alive) all += state.num_events;
  }
  return all;
}

void set_opening(int process, Opening opening) {
  const std::lock_guard lock(Machine::get().mutex);
  Machine::get().openings[process] = opening;
}

}  // namespace pyringar::model
