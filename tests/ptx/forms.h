// forms: what each form of an instruction does to the lanes of a warp.
//
// Contract  Bit for bit what PTX says: integers wrap, floats are rounded to nearest, even, and
//           nothing is flushed. The NaN of an operation has the bits that GPUs give it (0x7fffffff,
//           0xfff8000000000000, 0x7fff); PTX leaves those of fp64 open. What PTX leaves undefined
//           (a division by zero) is a Fault.
//           Accesses of memory, branches and barriers are described, and done by the machine.
// Source    PTX ISA 9.0, chapter 9.
// Tests     forms_test.cpp
#pragma once

#include <string>
#include <string_view>

#include "program.h"

namespace pyringar::ptx {

enum class Scope : std::uint8_t { kBlock, kDevice, kSystem };
enum class Strength : std::uint8_t { kWeak, kRelaxed, kAcquire, kRelease, kAcquireRelease };
enum class Space : std::uint8_t { kGeneric, kGlobal, kShared, kLocal, kParameters };

// The registers of a warp.
struct Registers {
  Lanes* lanes;
  const Lanes* constants;
  Mask* predicates;

  const Lanes& in(Place place) const { return place >= 0 ? lanes[place] : constants[~place]; }
  Lanes& out(Place place) { return lanes[place]; }
};

struct Form {
  enum class Kind : std::uint8_t {
    kLanes,  // run() does it all
    kClock,
    kBranch,
    kReturn,
    kBarrier,
    kBarrierOr,
    kSleep,
    kLoad,
    kStore,
    kSwap,  // atom.cas
    kAdd,   // atom.add
    kFence,
  };
  using Run = void (*)(Registers&, const Instruction&, Mask);

  std::string name;
  Kind kind = Kind::kLanes;
  Run run = nullptr;
  unsigned num_destinations = 1;
  // Of memory.
  Space space = Space::kGeneric;
  Strength strength = Strength::kWeak;
  Scope scope = Scope::kDevice;
  unsigned bytes = 0;  // of an element
  unsigned count = 1;  // of a vector
  bool is_signed = false;

  bool is_strong() const {
    return kind >= Kind::kLoad && (strength != Strength::kWeak || kind == Kind::kFence);
  }
};

// Null: no form that is known.
const Form* find_form(std::string_view name);

// Bits of a value, sign and all, as a register of so many bytes holds them.
std::uint64_t extended(std::uint64_t bits, unsigned bytes, bool is_signed, unsigned register_bytes);

}  // namespace pyringar::ptx
