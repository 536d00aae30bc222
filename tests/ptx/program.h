// program: PTX, read: a kernel is a list of instructions over lanes of 64 bits.
//
// Contract  Whatever is not known, a directive, a form of an instruction or an operand, is a Fault
//           that names it and its line. A register is 32 lanes of 64 bits, the bits above its type
//           zero; a predicate is a mask. Names that stand for addresses (parameters, shared and
//           local memory) are offsets from registers that whoever launches the kernel fills in.
// Source    PTX ISA 9.0, chapters 4 (syntax), 5 (state spaces, types), 9 (instructions).
// Tests     forms_test.cpp, test_ptx.py
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace pyringar::ptx {

inline constexpr unsigned kLanes = 32;
using Mask = std::uint32_t;  // of lanes
using Lanes = std::array<std::uint64_t, kLanes>;

struct Instruction;
struct Form;

// Registers that are there before the first instruction.
enum class Given : std::uint32_t {
  kThread,      // %tid.x
  kNumThreads,  // %ntid.x
  kBlock,       // %ctaid.x
  kNumBlocks,   // %nctaid.x
  kParameters,  // addresses of the first byte
  kShared,
  kLocal,
  kSink,  // "_": what is written there is not read
};
inline constexpr std::uint32_t kNumGiven = 8;

// A register, or, below zero, the constant ~place.
using Place = std::int32_t;
inline constexpr Place kNoPlace = INT32_MIN;

struct Instruction {
  const Form* form;
  std::uint32_t place;       // see place_name()
  std::uint32_t target = 0;  // of a branch
  Place guard = kNoPlace;    // a predicate
  bool guard_is_negated = false;
  std::uint8_t register_bytes = 8;  // of the first destination
  std::array<Place, 6> operands{};  // destinations first; vectors as their elements
  std::uint8_t num_operands = 0;
  std::uint8_t predicates = 0;  // bit i: operand i is one
  std::int64_t offset = 0;      // of an address, from its register
};

// Where an instruction stands, for people: "ring.cuh:203 (line 812)".
std::string place_name(std::uint32_t place);

struct Kernel {
  std::size_t parameter_bytes = 0;
  std::size_t parameter_align = 1;
  std::size_t shared_bytes = 0;
  std::size_t local_bytes = 0;
  unsigned max_threads = 1024;
  std::uint32_t num_registers = kNumGiven;
  std::uint32_t num_predicates = 0;
  std::vector<Instruction> code;
  std::vector<Lanes> constants;
};

// A file of PTX. Kernels are read when they are asked for.
class Module {
 public:
  Module(std::string file, std::string text);

  const std::string& file() const { return file_; }
  std::vector<std::string> names() const;
  const Kernel& kernel(const std::string& name);

 private:
  struct Source {
    std::size_t begin;  // of the name, in the text
    std::uint32_t line;
    std::unique_ptr<const Kernel> kernel;
  };

  const std::string file_;
  const std::string text_;
  std::map<std::size_t, std::string> sources_;              // by the number that .loc has
  std::map<std::string, std::size_t, std::less<>> shared_;  // offsets
  std::size_t shared_bytes_ = 0;
  std::map<std::string, Source> kernels_;
};

}  // namespace pyringar::ptx
