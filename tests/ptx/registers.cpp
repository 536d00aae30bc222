// registers: nvcc names a register for every value; those that do not live at once share one here,
// so that a warp's fit into the caches.
//
// Contract  The same program: lanes are apart, so where they are does not matter.
// Source    Poletto, Sarkar, "Linear scan register allocation", TOPLAS 1999.

#include "registers.h"

#include <algorithm>
#include <limits>
#include <map>
#include <vector>

#include "forms.h"

namespace pyringar::ptx {

namespace {

// Of registers, a bit each.
class Set {
 public:
  explicit Set(std::size_t size = 0) : words_((size + 63) / 64) {}

  bool has(std::size_t i) const { return (words_[i / 64] >> i % 64 & 1) != 0; }
  void add(std::size_t i) { words_[i / 64] |= std::uint64_t{1} << i % 64; }
  // Adds what `others` has and `without` has not; true if that is something.
  bool add(const Set& others, const Set& without) {
    bool is_more = false;
    for (std::size_t w = 0; w < words_.size(); ++w) {
      const std::uint64_t all = words_[w] | (others.words_[w] & ~without.words_[w]);
      is_more |= all != words_[w];
      words_[w] = all;
    }
    return is_more;
  }

 private:
  std::vector<std::uint64_t> words_;
};

// Instructions that are run one after the other.
struct Stretch {
  std::size_t begin;
  std::size_t end;
  std::vector<std::size_t> next = {};
  Set live_before = Set();  // read here, or behind, before it is written
  Set live_behind = Set();
  Set written = Set();
};

struct Interval {
  std::size_t begin = std::numeric_limits<std::size_t>::max();
  std::size_t end = 0;

  void include(std::size_t at) {
    begin = std::min(begin, at);
    end = std::max(end, at);
  }
};

// visit(register, is_written), what is read first.
template <typename Code, typename Visit>
void for_registers(Code& in, const Visit& visit) {
  for (std::size_t i = in.operands.size(); i-- > 0;) {
    const bool is_predicate = (in.predicates >> i & 1) != 0;
    if (i >= in.num_operands || is_predicate || in.operands[i] < 0) continue;
    if (in.operands[i] < static_cast<Place>(kNumGiven)) continue;
    visit(in.operands[i], i < in.form->num_destinations);
  }
}

std::vector<Stretch> stretches_of(const Kernel& kernel) {
  const std::vector<Instruction>& code = kernel.code;
  std::vector<bool> begins(code.size() + 1);
  begins[0] = true;
  const auto ends_here = [](const Instruction& in) {
    return in.form->kind == Form::Kind::kBranch || in.form->kind == Form::Kind::kReturn;
  };
  for (std::size_t i = 0; i < code.size(); ++i) {
    if (code[i].form->kind == Form::Kind::kBranch) begins[code[i].target] = true;
    if (ends_here(code[i])) begins[i + 1] = true;
  }
  std::vector<Stretch> stretches;
  std::map<std::size_t, std::size_t> by_begin;
  for (std::size_t i = 0; i < code.size(); ++i) {
    if (begins[i]) {
      by_begin[i] = stretches.size();
      stretches.push_back({i, i});
    }
    stretches.back().end = i + 1;
  }
  for (Stretch& stretch : stretches) {
    const Instruction& last = code[stretch.end - 1];
    const bool is_branch = last.form->kind == Form::Kind::kBranch;
    if (is_branch) stretch.next.push_back(by_begin.at(last.target));
    const bool goes_on = !ends_here(last) || last.guard != kNoPlace;
    if (goes_on && stretch.end < code.size()) stretch.next.push_back(by_begin.at(stretch.end));
    stretch.live_before = stretch.live_behind = stretch.written = Set(kernel.num_registers);
    for (std::size_t i = stretch.begin; i < stretch.end; ++i) {
      for_registers(code[i], [&](Place place, bool is_written) {
        const auto at = static_cast<std::size_t>(place);
        // What has a guard may leave what was there.
        const bool is_read = !is_written || code[i].guard != kNoPlace;
        if (is_read && !stretch.written.has(at)) stretch.live_before.add(at);
        if (is_written) stretch.written.add(at);
      });
    }
  }
  return stretches;
}

void find_live(std::vector<Stretch>& stretches, const Set& none) {
  for (bool has_changed = true; has_changed;) {
    has_changed = false;
    for (auto stretch = stretches.rbegin(); stretch != stretches.rend(); ++stretch) {
      for (const std::size_t next : stretch->next) {
        stretch->live_behind.add(stretches[next].live_before, none);
      }
      has_changed |= stretch->live_before.add(stretch->live_behind, stretch->written);
    }
  }
}

std::vector<Interval> intervals_of(const Kernel& kernel, const std::vector<Stretch>& stretches) {
  std::vector<Interval> intervals(kernel.num_registers);
  for (std::size_t i = 0; i < kernel.code.size(); ++i) {
    for_registers(kernel.code[i], [&](Place place, bool) {
      intervals[static_cast<std::size_t>(place)].include(i);
    });
  }
  for (const Stretch& stretch : stretches) {
    for (std::size_t i = 0; i < intervals.size(); ++i) {
      if (stretch.live_before.has(i)) intervals[i].include(stretch.begin);
      if (stretch.live_behind.has(i)) intervals[i].include(stretch.end);
    }
  }
  return intervals;
}

}  // namespace

void share_registers(Kernel& kernel) {
  std::vector<Stretch> stretches = stretches_of(kernel);
  find_live(stretches, Set(kernel.num_registers));
  const std::vector<Interval> intervals = intervals_of(kernel, stretches);
  std::vector<std::size_t> by_begin;
  for (std::size_t i = kNumGiven; i < intervals.size(); ++i) {
    if (intervals[i].begin <= intervals[i].end) by_begin.push_back(i);
  }
  std::sort(by_begin.begin(), by_begin.end(),
            [&](std::size_t a, std::size_t b) { return intervals[a].begin < intervals[b].begin; });
  std::vector<Place> places(intervals.size());
  std::multimap<std::size_t, Place> taken;  // by where their last value ends
  std::vector<Place> left;
  std::uint32_t count = kNumGiven;
  for (const std::size_t i : by_begin) {
    while (!taken.empty() && taken.begin()->first < intervals[i].begin) {
      left.push_back(taken.begin()->second);
      taken.erase(taken.begin());
    }
    if (left.empty()) left.push_back(static_cast<Place>(count++));
    places[i] = left.back();
    left.pop_back();
    taken.emplace(intervals[i].end, places[i]);
  }
  for (Instruction& in : kernel.code) {
    for_registers(in, [&](Place& place, bool) { place = places[static_cast<std::size_t>(place)]; });
  }
  kernel.num_registers = count;
}

}  // namespace pyringar::ptx
