// grid: a running kernel whose blocks wait, with one fiber per CUDA thread, in random order.
//
// Contract  slice() runs every fiber until it waits for its block or a flag. It returns true if any
//           fiber advanced. The model simulates time.
// Threads   one at a time.
// Tests     tests/cpp/cuda_host
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "check.h"
#include "cuda_emulator.h"

namespace pyringar::model {

class Grid : public emulator::FiberScheduler {
 public:
  Grid(emulator::Launch launch, const std::uint64_t* now_ns);
  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;

  bool slice(stress::Random& random);
  bool is_done() const { return num_running_ == 0; }
  unsigned num_blocks() const { return launch_.num_blocks; }

  void wait_for_block() override;
  void pause() override;
  std::uint64_t now_ns() override { return *now_ns_; }

 private:
  struct Block {
    emulator::BlockShared shared{};
    unsigned arrived = 0;
    unsigned passed = 0;
  };
  struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack;
    emulator::ThreadPosition position;
    unsigned passed = 0;  // number of passed barriers
    bool is_done = false;
  };
  static void enter(unsigned high, unsigned low);
  void yield();
  bool waits_for_block(const Fiber& fiber) const {
    return fiber.passed > blocks_[fiber.position.block].passed;
  }

  const emulator::Launch launch_;
  const std::uint64_t* const now_ns_;
  std::deque<Block> blocks_;
  std::deque<Fiber> fibers_;
  Fiber* current_ = nullptr;
  ucontext_t scheduler_{};
  std::size_t num_running_ = 0;
  std::uint64_t num_steps_ = 0;  // passed barriers and ended fibers
};

}  // namespace pyringar::model
