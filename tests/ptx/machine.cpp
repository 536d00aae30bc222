// machine: see the header.

#include "machine.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "fault.h"

namespace pyringar::ptx {

namespace {

constexpr std::uint64_t kUnwritten = 0x5a5a5a5a;
constexpr std::uint64_t kNsPerTurn = 10;
constexpr std::uint64_t kNsPerRest = 1'000'000;
constexpr unsigned kMostRests = 5'000;

}  // namespace

// Bytes that are aligned as they must be, and no better.
class Bytes {
 public:
  Bytes(std::size_t size, std::size_t align) : memory_(size + 2 * kMost), size_(size) {
    std::memset(memory_.data(), kUnwritten & 0xff, memory_.size());
    const auto begin = reinterpret_cast<std::uintptr_t>(memory_.data());
    const std::uintptr_t even = (begin + kMost - 1) / kMost * kMost;
    begin_ = align < kMost ? even + align : even;
  }
  std::uintptr_t begin() const { return begin_; }
  bool holds(std::uintptr_t at, std::size_t bytes) const {
    return at >= begin_ && at + bytes <= begin_ + size_;
  }

 private:
  static constexpr std::size_t kMost = 128;
  std::vector<std::byte> memory_;
  std::size_t size_;
  std::uintptr_t begin_;
};

// Lanes that are at one place.
struct Fragment {
  std::uint32_t pc;
  Mask mask;
  const Instruction* barrier = nullptr;  // that they wait at
};

struct Warp {
  Block* block;
  std::uint32_t first_thread;  // as memory counts them
  std::vector<Lanes> lanes;
  std::vector<Mask> predicates;
  std::unique_ptr<Bytes> local;
  std::vector<Fragment> fragments;
  std::vector<Fragment> waiting;  // at a barrier
  // What it looked at last, and how often that was the same.
  const Instruction* look = nullptr;
  std::uint32_t looked_at = 0;
  unsigned num_looks = 0;
  std::uint64_t stores_then = 0;

  const Instruction& at(std::uint32_t pc) const;
  bool is_at_strong(const Fragment& fragment) const { return at(fragment.pc).form->is_strong(); }
  bool is_at_strong() const {
    return std::all_of(fragments.begin(), fragments.end(),
                       [this](const Fragment& f) { return is_at_strong(f); });
  }
};

struct Block {
  const Launch* launch;
  const Bytes* parameters;
  unsigned index;  // of the launch
  std::size_t stream;
  std::uint32_t id;  // of memory
  Bytes shared;
  std::vector<std::unique_ptr<Warp>> warps;
  unsigned num_waiting = 0;  // threads
  unsigned num_ended = 0;
  const Form* barrier = nullptr;
  bool is_any_true = false;
  std::uint64_t num_instructions = 0;  // of its warps
};

const Instruction& Warp::at(std::uint32_t pc) const { return block->launch->kernel->code[pc]; }

Machine::Machine(Chooser& chooser, Limits limits)
    : chooser_(chooser), limits_(limits), memory_(chooser) {}
Machine::~Machine() = default;

// -- launches -------------------------------------------------------------------------------------

void Machine::enqueue(std::size_t stream, Launch launch) {
  const Kernel& kernel = *launch.kernel;
  if (launch.parameters.size() != kernel.parameter_bytes) {
    fault(launch.name, ": ", launch.parameters.size(), " bytes of parameters, expected ",
          kernel.parameter_bytes);
  }
  if (launch.num_threads > kernel.max_threads) {
    fault(launch.name, ": ", launch.num_threads, " threads, at most ", kernel.max_threads);
  }
  while (streams_.size() <= stream) streams_.emplace_back();
  streams_[stream].launches.push_back(std::move(launch));
}

void Machine::start_block(std::size_t stream_index) {
  Stream& stream = streams_[stream_index];
  const Launch& launch = stream.launches.front();
  const Kernel& kernel = *launch.kernel;
  if (stream.num_started == 0) {
    stream.parameters = std::make_shared<Bytes>(kernel.parameter_bytes, kernel.parameter_align);
    std::memcpy(reinterpret_cast<void*>(stream.parameters->begin()), launch.parameters.data(),
                launch.parameters.size());
  }
  const unsigned index = stream.num_started++;
  ++stream.num_running;
  const std::string name = join("", launch.name, " block ", index);
  const std::uint32_t id = memory_.add_block(name, launch.device, launch.num_threads, stream.known);
  auto block = std::make_unique<Block>(Block{&launch,
                                             stream.parameters.get(),
                                             index,
                                             stream_index,
                                             id,
                                             Bytes(kernel.shared_bytes, 8),
                                             {}});
  memory_.add_region(reinterpret_cast<const void*>(block->shared.begin()), kernel.shared_bytes,
                     "shared memory of " + name);
  for (unsigned first = 0; first < launch.num_threads; first += kLanes) {
    auto warp = std::make_unique<Warp>();
    warp->block = block.get();
    warp->first_thread = memory_.first_thread(id) + first;
    warp->lanes.resize(kernel.num_registers);
    for (Lanes& lanes : warp->lanes) lanes.fill(kUnwritten);
    warp->predicates.resize(kernel.num_predicates);
    warp->local = std::make_unique<Bytes>(kernel.local_bytes * kLanes, 16);
    const auto given = [&](Given which, const auto& value) {
      Lanes& lanes = warp->lanes[static_cast<std::size_t>(which)];
      for (unsigned lane = 0; lane < kLanes; ++lane) lanes[lane] = value(lane);
    };
    given(Given::kThread, [&](unsigned lane) { return first + lane; });
    given(Given::kNumThreads, [&](unsigned) { return launch.num_threads; });
    given(Given::kBlock, [&](unsigned) { return index; });
    given(Given::kNumBlocks, [&](unsigned) { return launch.num_blocks; });
    given(Given::kParameters, [&](unsigned) { return stream.parameters->begin(); });
    given(Given::kShared, [&](unsigned) { return block->shared.begin(); });
    given(Given::kLocal,
          [&](unsigned lane) { return warp->local->begin() + lane * kernel.local_bytes; });
    const unsigned count = std::min(kLanes, launch.num_threads - first);
    warp->fragments.push_back({0, ~Mask{0} >> (kLanes - count)});
    block->warps.push_back(std::move(warp));
  }
  blocks_.push_back(std::move(block));
}

void Machine::start_blocks() {
  for (std::size_t s = 0; s < streams_.size(); ++s) {
    Stream& stream = streams_[s];
    if (stream.launches.empty()) continue;
    const Launch& launch = stream.launches.front();
    const unsigned room = launch.is_cooperative ? launch.num_blocks : limits_.blocks_at_once;
    while (stream.num_started < launch.num_blocks && stream.num_running < room) start_block(s);
  }
}

void Machine::end_block(Block& block) {
  Stream& stream = streams_[block.stream];
  memory_.collect(block.id, stream.ended);
  memory_.remove_region(reinterpret_cast<const void*>(block.shared.begin()));
  if (--stream.num_running == 0 && stream.num_started == block.launch->num_blocks) {
    stream.known.join(std::exchange(stream.ended, {}));
    stream.launches.pop_front();
    stream.num_started = 0;
  }
  if (current_ != nullptr && current_->block == &block) current_ = nullptr;
  std::erase_if(blocks_, [&](const auto& other) { return other.get() == &block; });
}

void Machine::run() {
  for (start_blocks(); !blocks_.empty(); start_blocks()) {
    Warp* warp = next_warp();
    if (warp == nullptr) {
      let_time_pass();
      continue;
    }
    Block& block = *warp->block;
    try {
      take_turn(*warp);
    } catch (const Fault& error) {
      fault(error.what(), "in ", block.launch->what, "\n");
    }
    now_ns_ += kNsPerTurn;
    if (block.num_ended == block.launch->num_threads) end_block(block);
  }
  streams_.clear();
  memory_.forget();
}

// -- who is next ----------------------------------------------------------------------------------

bool Machine::is_resting(const Warp& warp) const {
  return warp.num_looks >= limits_.looks_before_rest && warp.fragments.size() == 1 &&
         warp.stores_then == memory_.num_stores();
}

// What a warp does before its next strong access can be seen by nobody, so it is done at once. Of
// those that have come to one, the warp that ran last is the calm choice, then those behind it.
Warp* Machine::next_warp() {
  candidates_.clear();
  std::size_t behind = 0;
  for (const auto& block : blocks_) {
    for (const auto& warp : block->warps) {
      if (warp.get() == current_) behind = candidates_.size();
      if (warp->fragments.empty() || is_resting(*warp)) continue;
      if (!warp->is_at_strong()) return warp.get();
      candidates_.push_back(warp.get());
    }
  }
  if (candidates_.empty()) return nullptr;
  const std::size_t n = candidates_.size();
  current_ = candidates_[(behind + chooser_.choose(n)) % n];
  return current_;
}

void Machine::let_time_pass() {
  if (stores_then_ != memory_.num_stores()) num_rests_ = 0;
  stores_then_ = memory_.num_stores();
  if (++num_rests_ > kMostRests) fault("nothing moves any more:\n", waiting());
  now_ns_ += kNsPerRest;
  for (const auto& block : blocks_) {
    for (const auto& warp : block->warps) warp->num_looks = 0;
  }
}

std::string Machine::waiting() const {
  std::string text;
  std::vector<std::uint32_t> ids;
  for (const auto& block : blocks_) {
    ids.push_back(block->id);
    for (const auto& warp : block->warps) {
      for (const Fragment& fragment : warp->fragments) {
        const auto lane = static_cast<std::uint32_t>(std::countr_zero(fragment.mask));
        text += join("", "  ", memory_.name_of(warp->first_thread + lane), " is at ",
                     place_name(warp->at(fragment.pc).place), "\n");
      }
    }
    if (block->num_waiting > 0) {
      text += join("", "  ", block->num_waiting, " threads of ", block->launch->name,
                   " wait at a barrier\n");
    }
  }
  return text + memory_.story(ids);
}

// -- warps ----------------------------------------------------------------------------------------

namespace {

// Lanes that have come to the same place go on together.
void merge(std::vector<Fragment>& fragments) {
  for (std::size_t i = 0; i < fragments.size(); ++i) {
    for (std::size_t j = fragments.size() - 1; j > i; --j) {
      if (fragments[i].pc != fragments[j].pc) continue;
      fragments[i].mask |= fragments[j].mask;
      fragments.erase(fragments.begin() + static_cast<std::ptrdiff_t>(j));
    }
  }
}

}  // namespace

// Until all lanes have come to strong accesses, one of which, the first, is done.
void Machine::take_turn(Warp& warp) {
  std::vector<Fragment>& fragments = warp.fragments;
  for (bool may_be_strong = warp.is_at_strong(); !fragments.empty();) {
    merge(fragments);
    std::sort(fragments.begin(), fragments.end(),
              [](const Fragment& a, const Fragment& b) { return a.pc < b.pc; });
    const auto weak = std::find_if(fragments.begin(), fragments.end(),
                                   [&](const Fragment& f) { return !warp.is_at_strong(f); });
    auto at = static_cast<std::size_t>(weak - fragments.begin());
    if (weak == fragments.end()) {
      if (!std::exchange(may_be_strong, false)) return;
      // Whoever waits must not keep the other lanes of its warp from what it waits for.
      const std::size_t calm = warp.num_looks > 0 ? fragments.size() - 1 : 0;
      at = (calm + chooser_.choose(fragments.size())) % fragments.size();
    }
    for (const std::size_t num = fragments.size();;) {
      const std::uint32_t pc = fragments[at].pc;
      const bool is_sleep = warp.at(pc).form->kind == Form::Kind::kSleep;
      ++num_instructions_;
      ++warp.block->num_instructions;
      if (!step(warp, fragments[at])) break;
      if (is_sleep) return;
      if (warp.is_at_strong(fragments[at])) break;
      const bool has_jumped = fragments[at].pc != pc + 1;
      if (num > 1 && (has_jumped || at + 1 == num || fragments[at + 1].pc == pc + 1)) break;
    }
  }
}

// False: the warp's fragments are others now.
bool Machine::step(Warp& warp, Fragment& fragment) {
  const Instruction& in = warp.block->launch->kernel->code[fragment.pc];
  Mask mask = fragment.mask;
  if (in.guard != kNoPlace) {
    const Mask guard = warp.predicates[static_cast<std::size_t>(in.guard)];
    mask &= in.guard_is_negated ? ~guard : guard;
    if (mask == 0) return ++fragment.pc, true;
  }
  using Kind = Form::Kind;
  switch (in.form->kind) {
    case Kind::kLanes: {
      Registers registers{warp.lanes.data(), warp.block->launch->kernel->constants.data(),
                          warp.predicates.data()};
      in.form->run(registers, in, mask);
      break;
    }
    case Kind::kClock:
      for (unsigned lane = 0; lane < kLanes; ++lane) {
        if ((mask >> lane & 1) != 0) {
          warp.lanes[static_cast<std::size_t>(in.operands[0])][lane] = now_ns_;
        }
      }
      break;
    case Kind::kBranch:
      if (mask != fragment.mask) {
        fragment.mask &= ~mask;
        ++fragment.pc;
        warp.fragments.push_back({in.target, mask});
        return false;
      }
      fragment.pc = in.target;
      return true;
    case Kind::kReturn:
      leave(warp, fragment, mask);
      return false;
    case Kind::kBarrier:
    case Kind::kBarrierOr:
      arrive(warp, fragment, in);
      return false;
    case Kind::kSleep:
      break;
    default:
      in.form->is_strong() ? access_strong(warp, in, mask) : access(warp, in, mask);
  }
  ++fragment.pc;
  return true;
}

void Machine::leave(Warp& warp, Fragment& fragment, Mask ended) {
  Block& block = *warp.block;
  block.num_ended += static_cast<unsigned>(std::popcount(ended));
  fragment.mask &= ~ended;
  ++fragment.pc;
  std::erase_if(warp.fragments, [](const Fragment& f) { return f.mask == 0; });
  if (block.num_waiting > 0) {
    fault("a thread of ", memory_.name_of(warp.first_thread),
          " ends while others of its block wait at a barrier\n");
  }
}

void Machine::arrive(Warp& warp, Fragment& fragment, const Instruction& in) {
  Block& block = *warp.block;
  const Mask mask = fragment.mask;
  const bool is_or = in.form->kind == Form::Kind::kBarrierOr;
  const Place number = in.operands[is_or ? 1 : 0];
  const bool is_first = number < 0 && number != kNoPlace &&
                        block.launch->kernel->constants[static_cast<std::size_t>(~number)][0] == 0;
  if (in.num_operands != (is_or ? 3 : 1) || !is_first) {
    fault(place_name(in.place), ": of barriers, number 0 of a whole block alone is known here\n");
  }
  if (in.guard != kNoPlace)
    fault(place_name(in.place), ": a barrier with a guard is not known here\n");
  if (block.num_waiting > 0 && block.barrier != in.form) {
    fault("threads of ", memory_.name_of(warp.first_thread), " wait at barriers of two kinds\n");
  }
  if (block.num_ended > 0) {
    fault("threads of ", memory_.name_of(warp.first_thread), " wait at ", place_name(in.place),
          " for others of their block that have ended\n");
  }
  block.barrier = in.form;
  if (is_or && (warp.predicates[static_cast<std::size_t>(in.operands[2])] & mask) != 0) {
    block.is_any_true = true;
  }
  block.num_waiting += static_cast<unsigned>(std::popcount(mask));
  warp.waiting.push_back({fragment.pc + 1, mask, &in});
  fragment.mask = 0;
  std::erase_if(warp.fragments, [](const Fragment& f) { return f.mask == 0; });
  if (block.num_waiting < block.launch->num_threads) return;
  memory_.barrier(block.id);
  for (const auto& other : block.warps) {
    for (const Fragment& waiting : other->waiting) {
      if (is_or) {
        Mask& told = other->predicates[static_cast<std::size_t>(waiting.barrier->operands[0])];
        told = block.is_any_true ? told | waiting.mask : told & ~waiting.mask;
      }
      other->fragments.push_back({waiting.pc, waiting.mask});
    }
    other->waiting.clear();
  }
  block.num_waiting = 0;
  block.is_any_true = false;
}

// -- memory ---------------------------------------------------------------------------------------

namespace {

Access described(const Instruction& in) {
  return {in.form->strength, in.form->scope, in.place, in.form->name.c_str()};
}

}  // namespace

void Machine::access(Warp& warp, const Instruction& in, Mask mask) {
  const Form& form = *in.form;
  const bool is_load = form.kind == Form::Kind::kLoad;
  const std::size_t bytes = form.bytes * form.count;
  const Kernel& kernel = *warp.block->launch->kernel;
  Registers registers{warp.lanes.data(), kernel.constants.data(), nullptr};
  const Lanes& base = registers.in(in.operands[is_load ? form.count : 0]);
  const Access access = described(in);
  for (Mask left = mask; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(std::countr_zero(left));
    const std::uintptr_t at = base[lane] + static_cast<std::uint64_t>(in.offset);
    const std::uint32_t thread = warp.first_thread + lane;
    if ((at & (bytes - 1)) != 0) {
      fault(memory_.name_of(thread), ": ", place_name(in.place), ", ", form.name,
            ": its address is not a multiple of ", bytes, ": ",
            form.space == Space::kParameters
                ? join("", "parameters + ", at - warp.block->parameters->begin())
                : memory_.name_of_address(at),
            "\n");
    }
    const bool is_local = form.space == Space::kLocal ||
                          (form.space == Space::kGeneric && warp.local->holds(at, bytes));
    if (is_local || form.space == Space::kParameters) {
      check_own(warp, in, lane, at, bytes);
    } else if (is_load) {
      memory_.read(thread, at, bytes, access);
    } else {
      memory_.write(thread, at, bytes, access);
    }
    auto* const data = reinterpret_cast<std::byte*>(at);
    for (unsigned i = 0; i < form.count; ++i) {
      std::byte* const element = data + i * form.bytes;
      if (is_load) {
        std::uint64_t bits = 0;
        std::memcpy(&bits, element, form.bytes);
        registers.out(in.operands[i])[lane] =
            extended(bits, form.bytes, form.is_signed, in.register_bytes);
      } else {
        std::memcpy(element, &registers.in(in.operands[1 + i])[lane], form.bytes);
      }
    }
  }
}

// Parameters and a thread's local memory are nobody else's.
void Machine::check_own(const Warp& warp, const Instruction& in, unsigned lane, std::uintptr_t at,
                        std::size_t bytes) const {
  const std::size_t local_bytes = warp.block->launch->kernel->local_bytes;
  const bool is_parameter = in.form->space == Space::kParameters;
  const std::uintptr_t local = warp.local->begin() + lane * local_bytes;
  const bool is_inside = is_parameter ? warp.block->parameters->holds(at, bytes)
                                      : at >= local && at + bytes <= local + local_bytes;
  if (is_inside) return;
  fault(memory_.name_of(warp.first_thread + lane), ": ", place_name(in.place), ", ", in.form->name,
        " is outside of the ", is_parameter ? "parameters\n" : "thread's local memory\n");
}

void Machine::access_strong(Warp& warp, const Instruction& in, Mask mask) {
  const Kernel& kernel = *warp.block->launch->kernel;
  Registers registers{warp.lanes.data(), kernel.constants.data(), nullptr};
  const Access access = described(in);
  const auto kind = in.form->kind;
  const bool has_result = in.form->num_destinations != 0;
  for (Mask left = mask; left != 0; left &= left - 1) {
    const auto lane = static_cast<unsigned>(std::countr_zero(left));
    const std::uint32_t thread = warp.first_thread + lane;
    const auto tell = [&](const std::string& where, std::uint32_t value) {
      if (observer_ == nullptr) return;
      observer_({warp.block->index, warp.block->num_instructions, in.form->name, where, value});
    };
    if (kind == Form::Kind::kFence) {
      memory_.fence(thread, access);
      tell("", 0);
      continue;
    }
    const auto operand = [&](std::size_t i) {
      return static_cast<std::uint32_t>(registers.in(in.operands[i])[lane]);
    };
    const std::uintptr_t at =
        registers.in(in.operands[has_result ? 1 : 0])[lane] + static_cast<std::uint64_t>(in.offset);
    if (at % sizeof(std::uint32_t) != 0) {
      fault(memory_.name_of(thread), ": ", place_name(in.place), ", ", in.form->name,
            " of a word that is not aligned\n");
    }
    std::uint32_t result = 0;
    if (kind == Form::Kind::kLoad) {
      result = memory_.load(thread, at, access);
      note_look(warp, in, result, thread);
    } else if (kind == Form::Kind::kStore) {
      memory_.store(thread, at, operand(1), access);
    } else if (kind == Form::Kind::kAdd) {
      result = memory_.update(thread, at, access, [&](std::uint32_t x) { return x + operand(2); });
    } else {
      result = memory_.update(thread, at, access,
                              [&](std::uint32_t x) { return x == operand(2) ? operand(3) : x; });
    }
    if (has_result) registers.out(in.operands[0])[lane] = result;
    tell(memory_.name_of_address(at), has_result ? result : operand(1));
  }
}

void Machine::note_look(Warp& warp, const Instruction& in, std::uint32_t value,
                        std::uint32_t thread) {
  const bool is_same = warp.look == &in && warp.looked_at == value &&
                       warp.stores_then == memory_.num_stores() && !memory_.was_stale(thread);
  warp.num_looks = is_same ? warp.num_looks + 1 : 0;
  warp.look = &in;
  warp.looked_at = value;
  warp.stores_then = memory_.num_stores();
}

}  // namespace pyringar::ptx
