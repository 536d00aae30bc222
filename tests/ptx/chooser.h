// chooser: who says what happens where PTX leaves it open.
//
// Contract  choose(n) gives a number below n. 0 is what a calm machine would do: the warp that runs
//           goes on, a load sees the newest value.
// Tests     litmus_test.cpp
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "check.h"

namespace pyringar::ptx {

class Chooser {
 public:
  virtual ~Chooser() = default;
  virtual std::size_t choose(std::size_t n) = 0;
};

// At random, mostly the calm one.
class RandomChooser : public Chooser {
 public:
  RandomChooser(std::uint64_t seed, int one_in) : random_(seed), one_in_(one_in) {}
  std::size_t choose(std::size_t n) override {
    return n > 1 && random_.one_in(one_in_) ? random_.below(n) : 0;
  }

 private:
  stress::Random random_;
  const int one_in_;
};

// All there is, one run after another, but for runs that leave the calm path more than `most`
// times.
class EveryChooser : public Chooser {
 public:
  explicit EveryChooser(std::size_t most = ~std::size_t{0}) : most_(most) {}

  std::size_t choose(std::size_t n) override {
    if (at_ == path_.size()) path_.push_back({0, num_turns_ < most_ ? n : 1});
    const Step& step = path_[at_++];
    num_turns_ += step.taken != 0;
    return step.taken;
  }
  // Begins the next run; false where there is none.
  bool advance() {
    at_ = num_turns_ = 0;
    while (!path_.empty() && path_.back().taken + 1 >= path_.back().num) path_.pop_back();
    if (path_.empty()) return false;
    ++path_.back().taken;
    return true;
  }

 private:
  struct Step {
    std::size_t taken;
    std::size_t num;
  };
  const std::size_t most_;
  std::vector<Step> path_;
  std::size_t at_ = 0;
  std::size_t num_turns_ = 0;
};

}  // namespace pyringar::ptx
