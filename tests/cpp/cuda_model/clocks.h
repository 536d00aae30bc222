// clocks: who has seen what: vector clocks of streams and host threads, and which accesses to
// memory nothing orders.
//
// Contract  An actor is a stream, a node of a graph or a host thread; each has a clock of its own.
//           What an actor does comes after all that its clock has joined. Two accesses to the same
//           bytes, one of them a write, that are ordered neither way are a race, reported with what
//           both were. Bytes that flags protect are only checked for being there, and what comes
//           after a wait that a host has ended is not checked.
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
  // A host that has waited for a stream goes on in order, however that came to an end.
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
  // A host has ended what this waited for: what comes after it is in no order.
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
  // "" or what races with it. `clock` is the actor's, ticked.
  std::string note(const Access& access, const Epoch& now, const Clock& clock);
  void forget(std::uintptr_t begin, std::size_t bytes);

 private:
  struct Bytes {
    Epoch written;
    std::vector<Epoch> read;  // since
  };
  void split(std::uintptr_t at);

  std::map<std::uintptr_t, std::pair<std::uintptr_t, Bytes>> ranges_;  // by begin: end, history
};

}  // namespace pyringar::model
