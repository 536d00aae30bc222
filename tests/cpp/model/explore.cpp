// explore: see explore.h.

#include "explore.h"

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "core/error.h"

namespace pyringar::model {

namespace {

bool is_store(const Event& event) {
  return event.action == Action::kWrite || event.action == Action::kPublish;
}

// Which events have happened, and what is in memory.
class Memory {
 public:
  explicit Memory(const Recording& recording)
      : recording_(recording),
        events_(recording.events()),
        done_(events_.size(), false),
        missing_(events_.size(), 0),
        versions_(recording.words().size(), 0) {
    for (std::size_t at = 0; at < events_.size(); ++at) missing_[at] = events_[at].after.size();
    for (int rank = 0; rank <= recording.num_ranks(); ++rank) {
      const auto is_before = [=](const Event& event) { return event.rank < rank; };
      begin_.push_back(static_cast<std::size_t>(
          std::partition_point(events_.begin(), events_.end(), is_before) - events_.begin()));
    }
  }

  bool is_done(std::size_t at) const { return done_[at]; }
  const std::vector<bool>& done() const { return done_; }
  std::size_t num_done() const { return num_done_; }
  std::size_t version(std::size_t word) const { return versions_[word]; }
  bool is_ready(std::size_t at) const { return !is_done(at) && missing_[at] == 0; }
  bool can_happen(std::size_t at) const {
    const Event& event = events_[at];
    return is_ready(at) && (event.action != Action::kWait || event.passes[versions_[event.word]]);
  }
  // A wrong value: found, or replaced.
  bool is_violation(std::size_t at) const {
    const Event& event = events_[at];
    const std::size_t version = versions_[event.word];
    if (event.action == Action::kWrite) return version + 1 != event.version;
    return event.action == Action::kRead && version != event.version;
  }

  void happen(std::size_t at) {
    const Event& event = events_[at];
    done_[at] = true;
    ++num_done_;
    if (is_store(event)) ++versions_[event.word];
    for (const std::size_t later : event.before) --missing_[later];
  }
  void undo(std::size_t at) {
    const Event& event = events_[at];
    done_[at] = false;
    --num_done_;
    if (is_store(event)) --versions_[event.word];
    for (const std::size_t later : event.before) ++missing_[later];
  }

  // Visits a rank's events in order, until visit(at) says false. Behind a wait that acquires,
  // nothing can happen.
  template <typename Visit>
  void visit_next(int rank, Visit&& visit) const {
    const auto r = static_cast<std::size_t>(rank);
    for (std::size_t at = begin_[r]; at < begin_[r + 1]; ++at) {
      if (is_done(at)) continue;
      if (!visit(at)) return;
      if (!is_done(at) && events_[at].action == Action::kWait && events_[at].ordered) return;
    }
  }

 private:
  const Recording& recording_;
  const std::vector<Event>& events_;
  std::vector<bool> done_;
  std::vector<std::size_t> missing_;
  std::vector<std::size_t> begin_{};  // by rank
  std::vector<std::size_t> versions_;
  std::size_t num_done_ = 0;
};

class Search {
 public:
  Search(const Recording& recording, bool tries_every_order)
      : recording_(recording),
        events_(recording.events()),
        tries_every_order_(tries_every_order),
        memory_(recording) {
    for (const Word& word : recording.words()) always_passes_.push_back(only_lets_pass(word));
  }

  Verdict run() {
    Verdict verdict;
    if (!recording_.complaints().empty()) {
      report_ = "before any step, by the programs alone:\n";
      for (const std::string& complaint : recording_.complaints()) report_ += complaint + "\n";
    } else {
      verdict.is_proved = visit();
    }
    verdict.num_states = states_.size();
    verdict.report = report_;
    return verdict;
  }

 private:
  bool visit() {
    if (!states_.insert(memory_.done()).second) return true;
    std::vector<std::size_t> possible;
    for (int rank = 0; rank < recording_.num_ranks(); ++rank) {
      memory_.visit_next(rank, [&](std::size_t at) {
        if (memory_.can_happen(at)) possible.push_back(at);
        return true;
      });
    }
    if (possible.empty()) return memory_.num_done() == events_.size() || report_deadlock();
    for (const std::size_t at : possible) {
      if (memory_.is_violation(at)) return report_violation(at);
    }
    choose(possible);
    for (const std::size_t at : possible) {
      memory_.happen(at);
      path_.push_back(at);
      if (!visit()) return false;
      path_.pop_back();
      memory_.undo(at);
    }
    return true;
  }

  // Keeps one event alone, if there is one that no other minds.
  void choose(std::vector<std::size_t>& possible) {
    if (tries_every_order_ || possible.size() == 1) return;
    for (const std::size_t at : possible) {
      const Event& event = events_[at];
      const bool is_payload = event.action == Action::kWrite || event.action == Action::kRead;
      const bool is_alone = is_payload ? no_other_minds(at) : always_passes_[event.word];
      if (!is_alone) continue;
      possible = {at};
      return;
    }
  }

  // Waits for this counter, once they may end, may end at every later version.
  bool only_lets_pass(const Word& word) const {
    const std::size_t at = static_cast<std::size_t>(&word - recording_.words().data());
    for (const Event& event : events_) {
      if (event.action != Action::kWait || event.word != at) continue;
      if (!std::is_sorted(event.passes.begin(), event.passes.end())) return false;
    }
    return true;
  }

  // On the same word, from the other side.
  bool are_opposites(const Event& a, const Event& b) const {
    return a.word == b.word && a.rank != b.rank && (is_store(a) || is_store(b));
  }

  // Lets everything happen that can without this event, and looks whether an opposite is among it.
  // A counter may stand still or go on: a wait passes if it may at any version on the way.
  bool no_other_minds(std::size_t at) {
    Memory future = memory_;
    const auto can_pass = [&](const Event& event) {
      for (std::size_t v = memory_.version(event.word); v <= future.version(event.word); ++v) {
        if (event.passes[v]) return true;
      }
      return false;
    };
    bool is_minded = false;
    for (bool goes_on = true; goes_on && !is_minded;) {
      goes_on = false;
      for (int rank = 0; rank < recording_.num_ranks(); ++rank) {
        future.visit_next(rank, [&](std::size_t next) {
          const Event& event = events_[next];
          const bool can = event.action == Action::kWait ? future.is_ready(next) && can_pass(event)
                                                         : future.can_happen(next);
          if (next == at || !can) return true;
          is_minded |= are_opposites(events_[at], event);
          future.happen(next);
          return goes_on = true;
        });
      }
    }
    return !is_minded;
  }

  // Whether these events can happen in this order, the last one being a violation.
  bool is_trace(const std::vector<std::size_t>& trace) const {
    Memory memory(recording_);
    for (const std::size_t at : trace) {
      if (!memory.can_happen(at)) return false;
      if (at == trace.back()) return memory.is_violation(at);
      memory.happen(at);
    }
    return false;
  }

  bool report_violation(std::size_t at) {
    std::vector<std::size_t> trace = path_;
    trace.push_back(at);
    const Event& event = events_[at];
    const Word& word = recording_.words()[event.word];
    // What need not have happened is left out, the latest first.
    for (std::size_t i = trace.size() - 1; i-- > 0;) {
      std::vector<std::size_t> shorter = trace;
      shorter.erase(shorter.begin() + static_cast<std::ptrdiff_t>(i));
      if (is_trace(shorter)) trace.swap(shorter);
    }
    Memory memory(recording_);
    for (std::size_t i = 0; i < trace.size(); ++i) {
      report_ += join(i + 1, ". ", recording_.show(trace[i]));
      if (i + 1 < trace.size()) {
        report_ += state_of_wait(memory, trace[i]) + "\n";
        memory.happen(trace[i]);
      }
    }
    const bool is_write = event.action == Action::kWrite;
    report_ += join(is_write ? " over " : ": expected ",
                    Recording::show(is_write ? word.values[event.version - 1] : event.meant),
                    is_write ? ", but found " : ", found ",
                    Recording::show(word.values[memory.version(event.word)]), "\n");
    return false;
  }

  std::string state_of_wait(const Memory& memory, std::size_t at) const {
    const Event& event = events_[at];
    if (event.action != Action::kWait) return "";
    return join(", and it is ", recording_.words()[event.word].counts[memory.version(event.word)]);
  }

  bool report_deadlock() {
    report_ =
        join("deadlock: after ", path_.size(), " of ", events_.size(), " steps nobody can go on\n");
    for (int rank = 0; rank < recording_.num_ranks(); ++rank) {
      std::string text = join("rank ", rank, ": has ended\n");
      memory_.visit_next(rank, [&](std::size_t next) {
        text = join(recording_.show(next), state_of_wait(memory_, next), " for ever\n");
        return false;
      });
      report_ += text;
    }
    return false;
  }

  const Recording& recording_;
  const std::vector<Event>& events_;
  const bool tries_every_order_;
  Memory memory_;
  std::unordered_set<std::vector<bool>> states_;
  std::vector<bool> always_passes_;  // by word
  std::vector<std::size_t> path_;
  std::string report_;
};

}  // namespace

Verdict explore(const Recording& recording, bool tries_every_order) {
  return Search(recording, tries_every_order).run();
}

}  // namespace pyringar::model
