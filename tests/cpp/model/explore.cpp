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
        first_(static_cast<std::size_t>(recording.num_ranks()) + 1, events_.size()),
        versions_(recording.words().size(), 0) {
    for (std::size_t at = events_.size(); at-- > 0;) {
      missing_[at] = events_[at].after.size();
      for (int rank = 0; rank <= events_[at].rank; ++rank) {
        first_[static_cast<std::size_t>(rank)] = at;
      }
    }
    for (std::size_t rank = 0; rank + 1 < first_.size(); ++rank) {
      if (first_[rank] < events_.size() && events_[first_[rank]].rank != static_cast<int>(rank)) {
        first_[rank] = first_[rank + 1];
      }
    }
    begin_ = first_;
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
    std::size_t& first = first_[static_cast<std::size_t>(event.rank)];
    while (first < end(event.rank) && is_done(first)) ++first;
  }
  void undo(std::size_t at) {
    const Event& event = events_[at];
    done_[at] = false;
    --num_done_;
    if (is_store(event)) --versions_[event.word];
    for (const std::size_t later : event.before) ++missing_[later];
    std::size_t& first = first_[static_cast<std::size_t>(event.rank)];
    first = std::min(first, at);
  }

  std::size_t first(int rank) const { return first_[static_cast<std::size_t>(rank)]; }
  std::size_t end(int rank) const { return begin_[static_cast<std::size_t>(rank) + 1]; }
  // Behind a wait that acquires, nothing can happen.
  bool ends_here(std::size_t at) const {
    return !is_done(at) && events_[at].action == Action::kWait && events_[at].ordered;
  }
  void list_possible(std::vector<std::size_t>& possible) const {
    possible.clear();
    for (int rank = 0; rank < recording_.num_ranks(); ++rank) {
      for (std::size_t at = first(rank); at < end(rank); ++at) {
        if (can_happen(at)) possible.push_back(at);
        if (ends_here(at)) break;
      }
    }
  }

 private:
  const Recording& recording_;
  const std::vector<Event>& events_;
  std::vector<bool> done_;
  std::vector<std::size_t> missing_;
  std::vector<std::size_t> first_;  // by rank, the first event that has not happened
  std::vector<std::size_t> begin_;
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
    memory_.list_possible(possible);
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

  // Events on the same word from the other side: one per rank is enough, the next.
  std::vector<std::size_t> opposites(std::size_t at) const {
    const Event& event = events_[at];
    const Word& word = recording_.words()[event.word];
    std::vector<std::size_t> found;
    const auto add_next = [&](const std::vector<std::size_t>& events, int rank) {
      for (const std::size_t other : events) {
        if (memory_.is_done(other) || events_[other].rank != rank) continue;
        found.push_back(other);
        return;
      }
    };
    for (int rank = 0; rank < recording_.num_ranks(); ++rank) {
      if (rank == event.rank) continue;
      add_next(word.writes, rank);
      if (event.action == Action::kWrite) {
        add_next(word.reads[static_cast<std::size_t>(rank)], rank);
      }
    }
    return found;
  }

  // Lets everything happen that can without this event, and looks whether an opposite is among it.
  // A counter may stand still or go on: a wait passes if it may at any version on the way.
  bool no_other_minds(std::size_t at) {
    const std::vector<std::size_t> others = opposites(at);
    if (others.empty()) return true;
    Memory future = memory_;
    const auto passes_later = [&](const Event& event) {
      for (std::size_t v = memory_.version(event.word); v <= future.version(event.word); ++v) {
        if (event.passes[v]) return true;
      }
      return false;
    };
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      for (int rank = 0; rank < recording_.num_ranks(); ++rank) {
        for (std::size_t next = future.first(rank); next < future.end(rank); ++next) {
          const Event& event = events_[next];
          const bool can = event.action == Action::kWait
                               ? future.is_ready(next) && passes_later(event)
                               : future.can_happen(next);
          if (next != at && can) {
            if (std::find(others.begin(), others.end(), next) != others.end()) return false;
            future.happen(next);
            goes_on = true;
          }
          if (future.ends_here(next)) break;
        }
      }
    }
    return true;
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
      const std::size_t next = memory_.first(rank);
      if (next == memory_.end(rank)) {
        report_ += join("rank ", rank, ": has ended\n");
        continue;
      }
      report_ += join(recording_.show(next), state_of_wait(memory_, next), " for ever\n");
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
