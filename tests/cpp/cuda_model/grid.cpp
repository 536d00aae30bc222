#include "grid.h"

#include <utility>

namespace pyringar::model {

namespace {

constexpr std::size_t kStackBytes = 128 * 1024;

}  // namespace

Grid::Grid(emulator::Launch launch, const std::uint64_t* now_ns)
    : launch_(std::move(launch)), now_ns_(now_ns), blocks_(launch_.num_blocks) {
  for (unsigned b = 0; b < launch_.num_blocks; ++b) {
    for (unsigned t = 0; t < launch_.num_threads; ++t) {
      Fiber& fiber = fibers_.emplace_back();
      fiber.stack = std::make_unique_for_overwrite<char[]>(kStackBytes);
      fiber.position = {
          t, launch_.num_threads, b, launch_.num_blocks, &blocks_[b].shared, nullptr, nullptr};
      fiber.position.device = launch_.device;
      fiber.position.scheduler = this;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.get();
      fiber.context.uc_stack.ss_size = kStackBytes;
      fiber.context.uc_link = nullptr;
      const auto self = reinterpret_cast<std::uintptr_t>(this);
      makecontext(&fiber.context, reinterpret_cast<void (*)()>(&Grid::enter), 2,
                  static_cast<unsigned>(self >> 32), static_cast<unsigned>(self));
    }
  }
  num_running_ = fibers_.size();
}

void Grid::enter(unsigned high, unsigned low) {
  auto* grid = reinterpret_cast<Grid*>(std::uintptr_t{high} << 32 | low);
  grid->launch_.kernel();
  grid->current_->is_done = true;
  --grid->num_running_;
  ++grid->num_steps_;
  grid->yield();
}

void Grid::yield() { swapcontext(&current_->context, &scheduler_); }

void Grid::pause() { yield(); }

void Grid::wait_for_block() {
  Block& block = blocks_[current_->position.block];
  current_->passed = block.passed + 1;
  if (++block.arrived == launch_.num_threads) {
    block.arrived = 0;
    ++block.passed;
    ++num_steps_;
  }
  while (waits_for_block(*current_)) yield();
}

bool Grid::slice(stress::Random& random) {
  const std::uint64_t before = num_steps_;
  const emulator::ThreadPosition outer = emulator::here;
  const std::size_t first = random.below(fibers_.size());
  for (std::size_t i = 0; i < fibers_.size(); ++i) {
    Fiber& fiber = fibers_[(first + i) % fibers_.size()];
    if (fiber.is_done || waits_for_block(fiber)) continue;
    current_ = &fiber;
    emulator::here = fiber.position;
    swapcontext(&scheduler_, &fiber.context);
    fiber.position = emulator::here;
  }
  emulator::here = outer;
  return num_steps_ != before;
}

}  // namespace pyringar::model
