// launches: the tests of the emulated kernels (tests/cpp/cuda), with kernels that are PTX.
//
// Contract  What cuda/kernels.h hands out are functions that stand for kernels, as nvcc's do:
// called
//           with the arguments, one notes what a driver would be told. Who launches calls it once.

#include "launches.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <span>
#include <sstream>
#include <type_traits>
#include <utility>

#include "core/fold.h"
#include "cuda/args.h"
#include "cuda/kernels.h"
#include "cuda/table.h"
#include "emulated.h"
#include "fault.h"
#include "machine.h"

namespace pyringar::ptx {

namespace {

using cuda::KernelKind;

struct Wanted {
  DType dtype;
  ReduceOp op;
  Order order;
  KernelKind kind;
  int divisor;
};

// The files of a folder.
class Kernels {
 public:
  void open(const std::string& folder) { folder_ = folder; }
  const Kernel& find(const std::string& stem, std::span<const std::string> words);

 private:
  std::string folder_;
  std::map<std::string, std::unique_ptr<Module>> modules_;
};

std::string text_of(const std::string& path) {
  std::ifstream file(path);
  if (!file) fault("cannot read ", path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

const Kernel& Kernels::find(const std::string& stem, std::span<const std::string> words) {
  std::unique_ptr<Module>& module = modules_[stem];
  if (module == nullptr) {
    const std::string path = join("", folder_, "/", stem, ".ptx");
    module = std::make_unique<Module>(path, text_of(path));
  }
  for (const std::string& name : module->names()) {
    const auto has = [&](const std::string& word) { return name.find(word) != std::string::npos; };
    if (std::all_of(words.begin(), words.end(), has)) return module->kernel(name);
  }
  fault(module->file(), ": no kernel has ", words.front(), " and what follows in its name");
}

// A kernel's name says what it is of.
std::vector<std::string> words_of(const Wanted& wanted) {
  static constexpr const char* kOps[] = {"3Sum", "3Sum", "3Max", "3Min", "4Prod"};
  std::string op = kOps[static_cast<int>(wanted.op)];
  if (wanted.kind == KernelKind::kRing) return {"ring_kernel", op};
  const bool multiplies = is_float(wanted.dtype) && (wanted.divisor & (wanted.divisor - 1)) == 0;
  if (wanted.op == ReduceOp::kMean && wanted.divisor != 1 && !multiplies) op = "4Mean";
  const bool has_trees =
      is_float(wanted.dtype) && wanted.op != ReduceOp::kMax && wanted.op != ReduceOp::kMin;
  const bool is_tree = has_trees && wanted.order == Order::kTree;
  const int num_pointers = wanted.kind == KernelKind::kFusedSmall ? cuda::SmallTable::kMaxPointers
                                                                  : cuda::LargeTable::kMaxPointers;
  return {is_tree ? "tree_kernel" : "fused_kernel", op, join("", "Li", num_pointers, "E")};
}

struct Called {
  Wanted wanted{};
  std::vector<std::byte> parameters;
};

// One round: a machine, and whatever it may touch.
struct Round {
  std::unique_ptr<Machine> machine;
  Called called;  // last
  std::size_t num_launches = 0;
};

Kernels kernels;
Round current;
std::uint64_t instructions_before = 0;

template <KernelKind kKind>
struct ArgumentOf;
template <>
struct ArgumentOf<KernelKind::kFusedSmall> : std::type_identity<cuda::SmallTable> {};
template <>
struct ArgumentOf<KernelKind::kFusedLarge> : std::type_identity<cuda::LargeTable> {};
template <>
struct ArgumentOf<KernelKind::kRing> : std::type_identity<cuda::RingArgs> {};

constexpr std::size_t kNumOrders = 2;
constexpr std::size_t kNumKernels =
    std::size_t{kNumDTypes} * kNumReduceOps * kNumOrders * cuda::kNumKernelKinds;

template <std::size_t kIndex>
void stand_in(
    typename ArgumentOf<static_cast<KernelKind>(kIndex % cuda::kNumKernelKinds)>::type a) {
  constexpr std::size_t kRest = kIndex / cuda::kNumKernelKinds;
  current.called.wanted = {static_cast<DType>(kRest / kNumOrders / kNumReduceOps),
                           static_cast<ReduceOp>(kRest / kNumOrders % kNumReduceOps),
                           static_cast<Order>(kRest % kNumOrders),
                           static_cast<KernelKind>(kIndex % cuda::kNumKernelKinds),
                           a.divisor.value};
  const auto* const bytes = reinterpret_cast<const std::byte*>(&a);
  current.called.parameters.assign(bytes, bytes + sizeof a);
}

const void* stand_in_at(std::size_t index) {
  static const auto kAll = []<std::size_t... i>(std::index_sequence<i...>) {
    return std::array{reinterpret_cast<const void*>(&stand_in<i>)...};
  }(std::make_index_sequence<kNumKernels>{});
  return kAll[index];
}

}  // namespace

void open_kernels(const std::string& folder) { kernels.open(folder); }

void begin_round(Chooser& chooser, const Limits& limits, Observer observer) {
  end_round();
  current.machine = std::make_unique<Machine>(chooser, limits);
  current.machine->observe(std::move(observer));
  current.num_launches = 0;
}

void end_round() {
  if (current.machine != nullptr) instructions_before += current.machine->num_instructions();
  current.machine.reset();
}

std::uint64_t num_instructions() { return instructions_before; }

void enqueue(std::size_t stream, const emulator::Launch& launch) {
  launch.kernel();
  const Wanted& wanted = current.called.wanted;
  const bool is_ring = wanted.kind == KernelKind::kRing;
  const std::string stem = join("", "kernels_", dtype_name(wanted.dtype));
  const std::string name = join("", "device ", launch.device, " launch ", current.num_launches++);
  const std::string what = join("", is_ring ? "ring" : "fused", " kernel of ",
                                dtype_name(wanted.dtype), ", ", op_name(wanted.op));
  current.machine->enqueue(stream,
                           {&kernels.find(stem, words_of(wanted)), name, what, launch.num_blocks,
                            launch.num_threads, launch.device, is_ring, current.called.parameters});
}

Machine& machine() { return *current.machine; }
const Kernel& find_kernel(const std::string& stem, const std::string& word) {
  return kernels.find(stem, {&word, 1});
}

void run_enqueued() { current.machine->run(); }

}  // namespace pyringar::ptx

// -- what the tests expect of who runs kernels ----------------------------------------------------

namespace pyringar::cuda {

const void* kernel_function(DType dtype, const Fold& fold, KernelKind kind) {
  const auto order = static_cast<std::size_t>(fold.order);
  const std::size_t of =
      static_cast<std::size_t>(dtype) * kNumReduceOps + static_cast<std::size_t>(fold.op);
  return ptx::stand_in_at((of * ptx::kNumOrders + order) * kNumKernelKinds +
                          static_cast<std::size_t>(kind));
}

}  // namespace pyringar::cuda

namespace pyringar::stress {

unsigned ring_threads(Random&) { return cuda::kRingThreads; }

// Mostly so small that a few threads move a piece, sometimes so large that all do, again and again.
std::uint32_t ring_slot_bytes(Random& random) {
  return random.one_in(8) ? 4 * 16 * cuda::kRingThreads + 4096 : 320;
}

void share_memory(const void* begin, std::size_t bytes, const std::string& name) {
  ptx::current.machine->memory().add_region(begin, bytes, name);
}

}  // namespace pyringar::stress

namespace pyringar::emulator {

void run_in_turn(const Launch& launch) {
  ptx::enqueue(0, launch);
  ptx::run_enqueued();
}

void run_streams(stress::Random&, const std::vector<std::vector<Launch>>& streams) {
  for (std::size_t s = 0; s < streams.size(); ++s) {
    for (const Launch& launch : streams[s]) ptx::enqueue(s, launch);
  }
  ptx::run_enqueued();
}

std::uint64_t now_ns() { return ptx::current.machine->now_ns(); }
void pause_a_little() { ptx::current.machine->pass(1'000); }
void wait_for_block() { CHECK(false, "a kernel's source runs here, not its PTX"); }
void check_scope(const std::uint32_t*, bool) {}

}  // namespace pyringar::emulator
