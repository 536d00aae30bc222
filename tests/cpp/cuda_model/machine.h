// machine: the state of the modelled runtime, and its scheduler.
//
// Contract  Called with the mutex held. A StreamWork is an entry of a stream or a node of a
// replayed
//           graph. It runs as a whole, except a Grid, which runs in slices. step() runs one work or
//           slice that can run.
// Threads   one at a time: RuntimeCall holds the lock.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "clocks.h"
#include "grid.h"
#include "runtime_model.h"

namespace pyringar::model {

inline constexpr int kDevices = 8;
inline constexpr int kMultiprocessors = 6;  // per device

struct Capture;
struct Graph;
struct GraphRun;

struct EventState {
  int device;
  std::uint64_t recorded = 0;                  // number of records by the host
  std::map<std::uint64_t, Clock> clocks = {};  // clocks of records that the device has run
  std::shared_ptr<Capture> capture = nullptr;  // capture of the last record
  std::set<std::size_t> nodes = {};            // nodes that a wait for this event depends on
};
using EventPtr = std::shared_ptr<EventState>;

inline bool has_come_to(const EventState& event, std::uint64_t record) {
  return record == 0 || event.clocks.count(record) > 0;
}

struct StreamWork {
  enum class Kind { kRun, kGrid, kRecord, kWait, kWriteWord, kAwaitWord, kGraph };
  Kind kind;
  std::string what;
  int process = 0;
  int device = 0;
  const void* kernel = nullptr;
  std::vector<Access> accesses = {};
  std::function<void()> run = {};
  emulator::Launch launch = {};
  EventPtr event = nullptr;
  std::uint64_t record = 0;
  std::uint32_t* word = nullptr;
  std::uint32_t value = 0;
  std::uint64_t ticket = 0;  // order of enqueueing
  std::shared_ptr<Graph> graph = nullptr;
  Clock from_host = {};
};

struct StreamState {
  int process;
  int device;
  bool is_blocking;  // true: synchronizes with the null stream
  Actor actor;
  std::uint64_t priority = 0;
  std::deque<StreamWork> entries = {};
  Clock clock = {};
  bool is_busy = false;  // a grid or graph of this stream runs
  bool is_destroyed = false;
  std::shared_ptr<Capture> capture = nullptr;
  std::set<std::size_t> nodes = {};  // in a capture: predecessors of the next node
};

struct Node {
  StreamWork work;
  std::set<std::size_t> after;
};

struct Graph {
  std::vector<Node> nodes;
};

struct Capture {
  std::uint64_t id;
  cudaStreamCaptureMode mode;
  int host;  // thread that began the capture
  StreamState* origin;
  std::shared_ptr<Graph> graph;
  std::set<StreamState*> streams;
  bool is_invalid = false;
  bool is_over = false;
};

struct GraphRun {
  StreamState* stream;
  StreamWork launch;
  std::vector<int> state;  // by node: 0 waiting, 1 running, 2 done
  std::vector<Clock> clocks;
  std::vector<Actor> actors;
};

struct Running {
  std::unique_ptr<Grid> grid;
  StreamWork work;
  StreamState* stream;
  GraphRun* graph;  // null: not in a graph
  std::size_t node;
};

struct Allocation {
  std::size_t bytes;
  int device;  // device index; -1: host memory
  int process;
  int fd;  // file descriptor; -1: heap memory
  bool is_tensor;
  int num_mapped = 0;
  std::uintptr_t canonical = 0;    // address in the owning process
  std::uintptr_t opened_from = 0;  // address of the original, for mappings
  std::string file = {};           // backing file of registered memory
};

struct ProcessState {
  bool is_alive = true;
  std::set<int> contexts;
  cudaError_t fault = cudaSuccess;
  bool is_held = false;
  std::set<std::pair<int, int>> reached;  // (device, peer whose memory its kernels can access)
  Refused refused = Refused::kNothing;
  int launches_left = -1;   // launches until one is refused; -1: never
  int visible_device = -1;  // -1: all
  long num_events = 0;
};

struct WordState {
  Clock clock = {};
  std::uint32_t value = 0;  // last value that a stream wrote
};

// An action of another thread, run once before a later call of this thread.
struct Interlude {
  std::function<void()> run = {};
  int calls_before = 0;
  void run_if_due();
};

struct Host {
  int id = -1;  // -1: not registered
  int process = 0;
  bool is_registered = false;
  int device = 0;
  std::vector<int> pushed;  // driver context stack
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  Interlude in_between;
  Interlude before_launch;
  std::uint64_t generation = 0;
  ~Host();
};
Host& host();

// Mutex that knows its owner: a memcpy() under this lock is the model's, not a host's.
class Mutex {
 public:
  void lock() {
    mutex_.lock();
    owner_ = std::this_thread::get_id();
  }
  void unlock() {
    owner_ = std::thread::id();
    mutex_.unlock();
  }
  bool is_mine() const { return owner_ == std::this_thread::get_id(); }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> owner_;
};
using Lock = std::unique_lock<Mutex>;

class Machine {
 public:
  static Machine& get();

  Mutex mutex;
  std::uint64_t generation = 0;
  stress::Random random{1};
  Options options;
  std::uint64_t now_ns = 0;
  int num_hosts = 0;  // registered host threads
  int num_actors = 0;
  std::vector<std::unique_ptr<StreamState>> streams;
  std::map<std::pair<int, int>, StreamState*> null_streams;  // by process and device
  std::deque<Running> running;
  std::deque<std::unique_ptr<GraphRun>> graph_runs;
  std::map<std::uintptr_t, Allocation> memory;  // by address
  std::map<int, ProcessState> processes;
  std::map<int, Opening> openings;
  std::map<int, Clock> host_clocks;
  std::set<std::shared_ptr<Capture>> captures;   // captures in progress
  std::set<std::pair<const void*, int>> loaded;  // (kernel, device)
  std::map<std::uintptr_t, WordState> words;     // by address
  std::uint64_t next_id = 1;
  Shadow shadow;
  std::optional<Broken> pending;  // thrown by the next runtime call

  void start(std::uint64_t seed, const Options& options);
  void throw_pending();

  // -- streams --
  StreamState* state_of(cudaStream_t stream);
  StreamState* make_stream(int process, int device, bool is_blocking);
  cudaError_t enqueue(StreamState* stream, StreamWork work);
  bool step();
  template <typename IsDone>
  void run_until(Lock& lock, const char* what, IsDone&& is_done);
  using IsAwaited = std::function<bool(const StreamState&)>;
  void drain(Lock& lock, const char* what, const IsAwaited& is_awaited);  // adds no order
  void wait_for(Lock& lock, const char* what, const IsAwaited& is_awaited);
  void load(Lock& lock, const void* kernel, int device);

  // -- clocks --
  Clock& host_clock();
  Actor host_actor() const;
  void note(const std::vector<Access>& accesses, const Epoch& now, const Clock& clock);
  void note_host(const void* begin, std::size_t bytes, Touch touch, const char* what);
  // Return the allocation that contains these bytes, or null.
  const std::pair<const std::uintptr_t, Allocation>* allocation_of(std::uintptr_t address,
                                                                   std::size_t bytes = 1) const;
  std::uintptr_t canonical(std::uintptr_t address, std::size_t bytes, const Epoch& now) const;
  void check_reach(const StreamWork& work, const Access& access);
  // Return a description of the work that still uses this memory, or "".
  std::string user_of(std::uintptr_t begin, std::size_t bytes) const;

  // -- captures, in capture.cpp --
  cudaError_t add_node(StreamState* stream, StreamWork work);
  cudaError_t invalidate(Capture& capture, cudaError_t error) const;
  cudaError_t check_unsafe_call();  // error for a call that a "global" capture forbids

 private:
  struct Candidate {
    std::uint64_t priority;
    StreamState* stream;
    GraphRun* graph;
    std::size_t node;
    Running* running;
  };
  bool can_begin(const StreamWork& work) const;
  bool is_first(const StreamState& stream) const;
  unsigned places_left(int device) const;
  std::vector<Candidate> candidates();
  bool take(const Candidate& candidate);
  bool run_grid(Running& running);
  void begin(StreamWork work, StreamState* stream, GraphRun* graph, std::size_t node);
  void run_work(const StreamWork& work, Clock& clock, Actor actor);
  void end_node(GraphRun& run, std::size_t node);
  void end_graph(GraphRun& run);
  std::string waiting() const;

  int steps_left_ = 0;
};

template <typename IsDone>
void Machine::run_until(Lock& lock, const char* what, IsDone&& is_done) {
  const stress::Stopwatch watch;
  for (int stuck = 0; !is_done();) {
    if (step()) {
      stuck = 0;
      continue;
    }
    ++stuck;
    if (num_hosts > 1 && watch.seconds() < 30) {  // another thread may still act
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      lock.lock();
    } else if (options.lets_time_pass && !running.empty() && stuck < 100'000) {
      now_ns += 1'000'000;
    } else {
      throw Broken("deadlock", join(what, " waits forever:", waiting()));
    }
  }
}

// Scope of one runtime call: holds the lock, reports faults, runs interludes.
class RuntimeCall {
 public:
  enum class Touches { kNothing, kDevice };
  explicit RuntimeCall(Touches touches = Touches::kDevice);
  Machine& machine() const { return machine_; }
  Lock& lock() { return lock_; }
  cudaError_t fault() const { return fault_; }
  cudaError_t check_unsafe() const;  // a fault, or a capture that forbids this call
  ProcessState& process() const { return machine_.processes[host().process]; }

 private:
  struct Between {
    Between();
  } between_;
  Machine& machine_;
  Lock lock_;
  cudaError_t fault_ = cudaSuccess;
};

// Unmap another process's memory. The last unmapping frees it if its process is dead.
void close_opened(Machine& machine, std::uintptr_t at);
int current_device();
inline constexpr int kAnyDevice = -1;
Machine::IsAwaited on_device(int device);
cudaError_t error(cudaError_t status);

}  // namespace pyringar::model
