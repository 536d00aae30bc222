// litmus_test: the memory itself, before it judges: all orders of small programs, and what of their
// outcomes PTX allows.

#include <cstdio>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "check.h"
#include "fault.h"
#include "machine.h"
#include "own_tests.h"

namespace pyringar::ptx {

namespace {

// In a body, x, y and z stand for words of memory, r0 to r3 for results, p for a predicate.
struct Thread {
  int device;
  int num_results;
  const char* body;
  unsigned num_threads = 1;  // of its block, all with this body; results are thread 0's
  bool follows = false;      // in the stream of the one before
};

struct Litmus {
  const char* name;
  const char* source;  // where PTX ISA 9.0 says so
  std::vector<Thread> blocks;
  std::set<std::string> outcomes;  // results in order of blocks; "race"
  const char* left_out = "";       // allowed, but not shown by this memory
};

#define WRITE_X "st.global.u32 [x], 1;"
#define READ_X_IF_R0 "setp.eq.u32 p, r0, 1; @p ld.global.u32 r1, [x];"
const std::set<std::string> kAll4 = {"0 0", "0 1", "1 0", "1 1"};
const std::set<std::string> kPassed = {"0 0", "1 1"};
const std::set<std::string> kRaces = {"0 0", "race"};

// The pattern of flag.cuh, with a barrier of the block on both sides. Thread 1 writes, and reads.
#define SETTLE(before, after)                                                 \
  "mov.u32 r3, %tid.x; setp.eq.u32 p, r3, 1; @p st.global.u32 [x], 1;" before \
  "bar.sync 0; setp.eq.u32 p, r3, 0;" after
#define WAIT(load)                                                    \
  "mov.u32 r3, %tid.x; setp.eq.u32 p, r3, 0; mov.u32 r0, 0; @p " load \
  " r0, [y]; setp.ne.u32 p, r0, 0; bar.red.or.pred q, 0, p;"
#define READ_X_TO_Z                                                          \
  "setp.ne.u32 p, r3, 0; @!p bra OVER; @!q bra OVER; ld.global.u32 r1, [x];" \
  "st.global.u32 [z], r1; OVER: bar.sync 0; setp.eq.u32 p, r3, 0; @p ld.global.u32 r1, [z];"

const Litmus kLitmus[] = {
    {"message passing, fence + relaxed / acquire",
     "8.8, 8.9.4, 8.9.5",
     {{0, 0, WRITE_X "fence.acq_rel.gpu; st.relaxed.gpu.u32 [y], 1;"},
      {0, 2, "ld.acquire.gpu.u32 r0, [y];" READ_X_IF_R0}},
     kPassed},
    {"message passing, release / acquire",
     "8.8",
     {{0, 0, WRITE_X "st.release.gpu.u32 [y], 1;"},
      {0, 2, "ld.acquire.gpu.u32 r0, [y];" READ_X_IF_R0}},
     kPassed},
    {"message passing, fence on both sides",
     "8.8",
     {{0, 0, WRITE_X "fence.acq_rel.gpu; st.relaxed.gpu.u32 [y], 1;"},
      {0, 2, "ld.relaxed.gpu.u32 r0, [y]; fence.acq_rel.gpu;" READ_X_IF_R0}},
     kPassed},
    {"a release goes on in the word's next store",
     "8.8",
     {{0, 0, WRITE_X "st.release.gpu.u32 [y], 1; st.relaxed.gpu.u32 [y], 2;"},
      {0, 2, "ld.acquire.gpu.u32 r0, [y]; setp.eq.u32 p, r0, 2; @p ld.global.u32 r1, [x];"}},
     {"0 0", "1 0", "2 1"}},
    {"an acquire is of what was read relaxed before",
     "8.8",
     {{0, 0, WRITE_X "st.release.gpu.u32 [y], 1;"},
      {0, 0, "st.relaxed.gpu.u32 [y], 2;"},
      {0, 2, "ld.relaxed.gpu.u32 r0, [y]; ld.acquire.gpu.u32 r2, [y];" READ_X_IF_R0}},
     {"0 0", "1 1", "2 0"}},
    {"message passing, a strong message",
     "8.8, 8.10.6",
     {{0, 0, "st.relaxed.gpu.u32 [x], 1; fence.acq_rel.gpu; st.relaxed.gpu.u32 [y], 1;"},
      {0, 2, "ld.acquire.gpu.u32 r0, [y]; ld.relaxed.gpu.u32 r1, [x];"}},
     {"0 0", "0 1", "1 1"}},
    {"written again behind the flag",
     "8.9.5",
     {{0, 0, WRITE_X "fence.acq_rel.gpu; st.relaxed.gpu.u32 [y], 1;" WRITE_X},
      {0, 2, "ld.acquire.gpu.u32 r0, [y];" READ_X_IF_R0}},
     kRaces},
    {"no fence",
     "8.9.5, 8.10.6",
     {{0, 0, WRITE_X "st.relaxed.gpu.u32 [y], 1;"},
      {0, 2, "ld.acquire.gpu.u32 r0, [y];" READ_X_IF_R0}},
     kRaces},
    {"no acquire",
     "8.9.5, 8.10.6",
     {{0, 0, WRITE_X "fence.acq_rel.gpu; st.relaxed.gpu.u32 [y], 1;"},
      {0, 2, "ld.relaxed.gpu.u32 r0, [y];" READ_X_IF_R0}},
     kRaces},
    {"payload after flag",
     "8.9.5",
     {{0, 0, "fence.acq_rel.gpu; st.relaxed.gpu.u32 [y], 1;" WRITE_X},
      {0, 2, "ld.acquire.gpu.u32 r0, [y];" READ_X_IF_R0}},
     kRaces},
    {"two devices, scope of the system",
     "8.5, 8.7",
     {{0, 0, WRITE_X "fence.acq_rel.sys; st.relaxed.sys.u32 [y], 1;"},
      {1, 2, "ld.acquire.sys.u32 r0, [y];" READ_X_IF_R0}},
     kPassed},
    {"two devices, fence of the device",
     "8.7, 8.9.4",
     {{0, 0, WRITE_X "fence.acq_rel.gpu; st.relaxed.sys.u32 [y], 1;"},
      {1, 2, "ld.acquire.sys.u32 r0, [y];" READ_X_IF_R0}},
     kRaces},
    {"two devices, flag of the device",
     "8.7",
     {{0, 0, WRITE_X "fence.acq_rel.sys; st.relaxed.gpu.u32 [y], 1;"},
      {1, 2, "ld.acquire.sys.u32 r0, [y];" READ_X_IF_R0}},
     {"race"}},
    {"two blocks, scope of the block",
     "8.7",
     {{0, 0, WRITE_X "fence.acq_rel.cta; st.relaxed.gpu.u32 [y], 1;"},
      {0, 2, "ld.acquire.gpu.u32 r0, [y];" READ_X_IF_R0}},
     kRaces},
    {"settle() and wait()",
     "8.9.4, 8.9.5",
     {{0, 0, SETTLE("", "@p fence.acq_rel.gpu; @p st.relaxed.gpu.u32 [y], 1;"), 2},
      {0, 2, WAIT("ld.acquire.gpu.u32") READ_X_TO_Z, 2}},
     kPassed},
    {"fence before the barrier",
     "8.9.4",
     {{0, 0, SETTLE("fence.acq_rel.gpu;", "@p st.relaxed.gpu.u32 [y], 1;"), 2},
      {0, 2, WAIT("ld.acquire.gpu.u32") READ_X_TO_Z, 2}},
     kRaces},
    {"no barrier before the fence",
     "8.9.4",
     {{0, 0,
       "mov.u32 r3, %tid.x; setp.eq.u32 p, r3, 1; @p st.global.u32 [x], 1; setp.eq.u32 p, r3, 0;"
       "@p fence.acq_rel.gpu; @p st.relaxed.gpu.u32 [y], 1;",
       2},
      {0, 2, WAIT("ld.acquire.gpu.u32") READ_X_TO_Z, 2}},
     kRaces},
    {"a slot that was read is written again",
     "8.9.5, 8.10.6",
     {{0, 2, "ld.global.u32 r0, [x]; fence.acq_rel.gpu; st.relaxed.gpu.u32 [y], 1;"},
      {0, 1, "ld.acquire.gpu.u32 r0, [y]; setp.eq.u32 p, r0, 1; @p st.global.u32 [x], 2;"}},
     {"0 0 0", "0 0 1"}},
    {"a slot that is read is written again",
     "8.9.5",
     {{0, 2, "st.relaxed.gpu.u32 [y], 1; ld.global.u32 r0, [x];"},
      {0, 1, "ld.acquire.gpu.u32 r0, [y]; setp.eq.u32 p, r0, 1; @p st.global.u32 [x], 2;"}},
     {"0 0 0", "race"}},
    {"a launch behind another one of its stream",
     "8.9.5",
     {{0, 0, WRITE_X}, {0, 1, "ld.global.u32 r0, [x];", 1, true}},
     {"1"}},
    {"launches of two streams",
     "8.9.5",
     {{0, 0, WRITE_X}, {0, 1, "ld.global.u32 r0, [x];"}},
     {"race"}},
    {"an order is handed on (three threads)",
     "8.9.5",
     {{0, 0, WRITE_X "fence.acq_rel.gpu; st.relaxed.gpu.u32 [y], 1;"},
      {0, 0, "ld.acquire.gpu.u32 r0, [y]; setp.eq.u32 p, r0, 1; @p st.release.gpu.u32 [z], 1;"},
      {0, 2, "ld.acquire.gpu.u32 r0, [z];" READ_X_IF_R0}},
     kPassed},
    {"an update hands on what it read",
     "8.9.2",
     {{0, 0, WRITE_X "st.release.gpu.u32 [y], 1;"},
      {0, 0, "atom.global.add.u32 r0, [y], 1;"},
      {0, 2, "ld.acquire.gpu.u32 r0, [y]; setp.eq.u32 p, r0, 2; @p ld.global.u32 r1, [x];"}},
     {"0 0", "1 0", "2 1"}},
    {"one claims",
     "8.10.3",
     {{0, 1, "atom.global.cas.b32 r0, [x], 0, 1;"}, {0, 1, "atom.global.cas.b32 r0, [x], 0, 1;"}},
     {"0 1", "1 0"}},
    {"a word is not read backwards",
     "8.10.5",
     {{0, 0, "st.relaxed.gpu.u32 [x], 1; st.relaxed.gpu.u32 [x], 2;"},
      {0, 2, "ld.relaxed.gpu.u32 r0, [x]; ld.relaxed.gpu.u32 r1, [x];"}},
     {"0 0", "0 1", "0 2", "1 1", "1 2", "2 2"}},
    {"a thread sees what it wrote, or newer",
     "8.10.5",
     {{0, 1, "st.relaxed.gpu.u32 [x], 1; ld.relaxed.gpu.u32 r0, [x];"},
      {0, 0, "st.relaxed.gpu.u32 [x], 2;"}},
     {"1", "2"}},
    {"a weak store between strong loads",
     "8.10.5",
     {{0, 2, "ld.relaxed.gpu.u32 r0, [x]; st.global.u32 [x], 5; ld.relaxed.gpu.u32 r1, [x];"}},
     {"0 5"}},
    {"relaxed messages overtake",
     "8.10.6",
     {{0, 0, "st.relaxed.gpu.u32 [x], 1; st.relaxed.gpu.u32 [y], 1;"},
      {0, 2, "ld.relaxed.gpu.u32 r0, [y]; ld.relaxed.gpu.u32 r1, [x];"}},
     kAll4},
    {"store buffering, in spite of fences",
     "8.10.2",
     {{0, 1, "st.relaxed.gpu.u32 [x], 1; fence.acq_rel.gpu; ld.relaxed.gpu.u32 r0, [y];"},
      {0, 1, "st.relaxed.gpu.u32 [y], 1; fence.acq_rel.gpu; ld.relaxed.gpu.u32 r0, [x];"}},
     kAll4},
    {"two readers see two writers in two orders",
     "8.10.2",
     {{0, 0, "st.relaxed.gpu.u32 [x], 1;"},
      {0, 0, "st.relaxed.gpu.u32 [y], 1;"},
      {0, 2, "ld.acquire.gpu.u32 r0, [x]; ld.acquire.gpu.u32 r1, [y];"},
      {0, 2, "ld.acquire.gpu.u32 r0, [y]; ld.acquire.gpu.u32 r1, [x];"}},
     {"0 0 0 0", "0 0 0 1", "0 0 1 0", "0 0 1 1", "0 1 0 0", "0 1 0 1", "0 1 1 0", "0 1 1 1",
      "1 0 0 0", "1 0 0 1", "1 0 1 0", "1 0 1 1", "1 1 0 0", "1 1 0 1", "1 1 1 0", "1 1 1 1"}},
    {"load buffering",
     "8.10.4",
     {{0, 1, "ld.relaxed.gpu.u32 r0, [x]; st.relaxed.gpu.u32 [y], 1;"},
      {0, 1, "ld.relaxed.gpu.u32 r0, [y]; st.relaxed.gpu.u32 [x], 1;"}},
     {"0 0", "0 1", "1 0"},
     "1 1"},
};

constexpr std::size_t kWordsEach = 16;  // of a variable
constexpr std::size_t kResults = 4;

std::string kernel_text(const Thread& thread, std::size_t block) {
  std::string text = join("", "\n.visible .entry block", block,
                          "(.param .u64 memory)\n{\n.reg .b64 m<5>;\n.reg .b32 r<4>;\n",
                          ".reg .b32 t;\n.reg .pred p;\n.reg .pred q;\n.reg .pred first;\n",
                          "ld.param.u64 m4, [memory];\n");
  for (int i = 0; i < 4; ++i) text += join("", "mov.u32 r", i, ", 0;\n");
  const auto address = [&](std::string_view name) {
    return join("", "m4+", 4 * kWordsEach * static_cast<std::size_t>(name[0] - 'x'));
  };
  for (std::string_view rest = thread.body; !rest.empty();) {
    const bool is_variable = rest.size() > 2 && rest[0] == '[' && rest[2] == ']';
    text += is_variable ? join("", "[", address(rest.substr(1, 1)), "]") : std::string(1, rest[0]);
    rest.remove_prefix(is_variable ? 3 : 1);
  }
  text += "\nmov.u32 t, %tid.x;\nsetp.eq.u32 first, t, 0;\n";
  for (int i = 0; i < thread.num_results; ++i) {
    const std::size_t word = 3 * kWordsEach + block * kResults + static_cast<std::size_t>(i);
    text += join("", "@first st.global.u32 [m4+", 4 * word, "], r", i, ";\n");
  }
  return text + "ret;\n}\n";
}

std::string outcome_of(const Litmus& litmus, Module& module, Chooser& chooser) {
  std::uint32_t memory[3 * kWordsEach + kResults * 4] = {};
  Machine machine(chooser);
  machine.memory().add_region(memory, sizeof memory, "memory");
  std::size_t stream = 0;
  for (std::size_t block = 0; block < litmus.blocks.size(); ++block) {
    const Thread& thread = litmus.blocks[block];
    if (!thread.follows) stream = block;
    const std::uint32_t* const pointer = memory;
    std::vector<std::byte> parameters(sizeof pointer);
    std::memcpy(parameters.data(), &pointer, sizeof pointer);
    const std::string name = join("", "block", block);
    machine.enqueue(stream, {&module.kernel(name), name, litmus.name, 1, thread.num_threads,
                             thread.device, true, parameters});
  }
  try {
    machine.run();
  } catch (const Fault& fault) {
    CHECK(std::string(fault.what()).starts_with("a race"), litmus.name, ": ", fault.what());
    return "race";
  }
  std::string outcome;
  for (std::size_t block = 0; block < litmus.blocks.size(); ++block) {
    for (int i = 0; i < litmus.blocks[block].num_results; ++i) {
      const std::size_t word = 3 * kWordsEach + block * kResults + static_cast<std::size_t>(i);
      outcome += join("", outcome.empty() ? "" : " ", memory[word]);
    }
  }
  return outcome;
}

std::string listed(const std::set<std::string>& outcomes) {
  if (outcomes.size() == 16) return "all 16";
  std::string text;
  for (const std::string& outcome : outcomes) text += (text.empty() ? "" : ", ") + outcome;
  return text;
}

}  // namespace

// All orders, and all values that loads may see: the outcomes must be those, and all of them.
void litmus_round(stress::Random&) {
  std::printf("| program | PTX ISA | outcomes | runs |\n|---|---|---|---:|\n");
  for (const Litmus& litmus : kLitmus) {
    std::string text = ".version 9.0\n.target sm_90\n.address_size 64\n";
    for (std::size_t b = 0; b < litmus.blocks.size(); ++b) text += kernel_text(litmus.blocks[b], b);
    Module module(litmus.name, text);
    EveryChooser chooser;
    std::set<std::string> found;
    std::size_t num_runs = 0;
    do {
      found.insert(outcome_of(litmus, module, chooser));
      ++num_runs;
    } while (chooser.advance());
    std::printf("| %s | %s | %s%s%s | %zu |\n", litmus.name, litmus.source, listed(found).c_str(),
                *litmus.left_out != '\0' ? "; allowed, not shown: " : "", litmus.left_out,
                num_runs);
    CHECK(found == litmus.outcomes, litmus.name, ": found ", listed(found), "; expected ",
          listed(litmus.outcomes));
  }
}

}  // namespace pyringar::ptx
