// clocks: vector clocks of streams and host threads, which detect unordered memory accesses.
//
// Contract  An actor is a stream, a graph node or a host thread, with one clock. Two accesses to
//           the same bytes, one of them a write, are a race if neither actor's clock has seen the
//           other access. Bytes that flags order are only checked for allocation. Accesses after a
//           wait that a host has released are not checked.
// Threads   one at a time.
// Source    Flanagan and Freund, "FastTrack", 2009: the epochs; djit+: the clocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace pyringar::model {

using Actor = int;
inline constexpr Actor kNobody = -1;

class Clock {
 public:
  void join(const Clock& other) {
    is_released_ |= other.is_released_;
    join_times(other);
  }
  // Join without is_released_: a host that waited for a stream is ordered after it.
  void join_times(const Clock& other) {
    for (const auto& [actor, time] : other.times_) {
      std::uint64_t& own = times_[actor];
      if (own < time) own = time;
    }
  }
  std::uint64_t tick(Actor actor) { return ++times_[actor]; }
  bool has_seen(Actor actor, std::uint64_t time) const {
    const auto found = times_.find(actor);
    return found != times_.end() && found->second >= time;
  }
  // A host ended the stream's wait: later accesses of the stream have no order.
  void release() { is_released_ = true; }
  bool is_released() const { return is_released_; }

 private:
  bool is_released_ = false;
  std::map<Actor, std::uint64_t> times_;
};

enum class Touch { kRead, kWrite, kFlags };

struct Access {
  std::uintptr_t begin;
  std::size_t bytes;
  Touch touch;
};

inline Access access(const void* begin, std::size_t bytes, Touch touch) {
  return {reinterpret_cast<std::uintptr_t>(begin), bytes, touch};
}

struct Epoch {
  Actor actor = kNobody;
  std::uint64_t time = 0;
  std::string what;
  bool is_released = false;
};

class Shadow {
 public:
  // Record an access. Return a description of the race, or "". clock: the actor's, after tick().
  std::string note(const Access& access, const Epoch& now, const Clock& clock);
  void forget(std::uintptr_t begin, std::size_t bytes);

 private:
  struct Bytes {
    Epoch written;
    std::vector<Epoch> read;  // reads since the last write
  };
  void split(std::uintptr_t at);

  std::map<std::uintptr_t, std::pair<std::uintptr_t, Bytes>> ranges_;  // begin -> (end, accesses)
};

}  // namespace pyringar::model
