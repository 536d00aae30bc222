// machine: devices that run kernels: streams, blocks, warps, barriers, and a clock.
//
// Contract  A warp runs until a strong access, a barrier or its end; then a Chooser says who is
//           next: any warp of any block that is on a device. That is enough: what happens between
//           strong accesses is the same in every order, or a race (memory.h). Of lanes that have
//           gone different ways, too, those at strong accesses are next in any order. All blocks of
//           a launch that waits are on their device at once, as a cooperative launch promises; of
//           others, as many as there is room for. Whoever reads the same value again and again
//           rests until something is written. When all do, time passes; when it has passed for
//           long, that is a Fault. What nothing has written (registers, shared memory) is
//           kUnwritten.
// Units     nanoseconds on the one clock of all devices.
// Threads   one.
// Tests     litmus_test.cpp, kernels_test.cpp
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "chooser.h"
#include "memory.h"
#include "program.h"

namespace pyringar::ptx {

struct Launch {
  const Kernel* kernel;
  std::string name;  // for people: of the launch, and of what is launched
  std::string what;
  unsigned num_blocks;
  unsigned num_threads;
  int device;
  bool is_cooperative;
  std::vector<std::byte> parameters;  // as a driver lays them out
};

// A strong access, for pictures.
struct Seen {
  unsigned block;                  // of its launch
  std::uint64_t num_instructions;  // that the block's warps have done so far
  std::string what;
  std::string where;  // "": a fence
  std::uint32_t value;
};
using Observer = std::function<void(const Seen&)>;

struct Limits {
  unsigned blocks_at_once = 4;     // of a launch that is not cooperative
  unsigned looks_before_rest = 2;  // at a word that stays the same
};

class Bytes;
struct Block;
struct Fragment;
struct Warp;

class Machine {
 public:
  explicit Machine(Chooser& chooser, Limits limits = {});
  ~Machine();

  Memory& memory() { return memory_; }
  void observe(Observer observer) { observer_ = std::move(observer); }
  // Launches of one stream follow each other; streams are not ordered. run() ends when all are
  // over, and comes before what is enqueued after it.
  void enqueue(std::size_t stream, Launch launch);
  void run();

  std::uint64_t now_ns() const { return now_ns_; }
  void pass(std::uint64_t ns) { now_ns_ += ns; }
  std::uint64_t num_instructions() const { return num_instructions_; }  // of warps

 private:
  struct Stream {
    std::deque<Launch> launches;
    Knowledge known;  // of its launches that are over
    // Of the first launch.
    std::shared_ptr<Bytes> parameters = nullptr;
    unsigned num_started = 0;  // blocks
    unsigned num_running = 0;
    Knowledge ended = {};
  };

  void start_blocks();
  void start_block(std::size_t stream);
  void end_block(Block& block);
  Warp* next_warp();
  bool is_resting(const Warp& warp) const;
  void let_time_pass();
  std::string waiting() const;

  void take_turn(Warp& warp);
  bool step(Warp& warp, Fragment& fragment);
  void branch(Warp& warp, Fragment& fragment, const Instruction& in, Mask taken);
  void arrive(Warp& warp, Fragment& fragment, const Instruction& in);
  void leave(Warp& warp, Fragment& fragment, Mask ended);
  void access(Warp& warp, const Instruction& in, Mask mask);
  void check_own(const Warp& warp, const Instruction& in, unsigned lane, std::uintptr_t at,
                 std::size_t bytes) const;
  void access_strong(Warp& warp, const Instruction& in, Mask mask);
  void note_look(Warp& warp, const Instruction& in, std::uint32_t value, std::uint32_t thread);

  Chooser& chooser_;
  const Limits limits_;
  Memory memory_;
  Observer observer_;
  std::deque<Stream> streams_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::uint64_t now_ns_ = 1'000'000;
  std::uint64_t num_instructions_ = 0;
  std::uint64_t num_launched_ = 0;
  unsigned num_rests_ = 0;  // of all at once, since something was written
  std::uint64_t stores_then_ = 0;
  Warp* current_ = nullptr;
  std::vector<Warp*> candidates_;
};

}  // namespace pyringar::ptx
