// peer_watch: polls, yields and sleeps of a rank, liveness of peers, and the shared failure.
#include "process/peer_watch.h"

#include <algorithm>
#include <cstring>

#include "os/thread.h"

namespace pyringar {

namespace {

using namespace std::chrono_literals;

// Numbers of polls and of yields in one wait, measured on two cores.
constexpr int kPausesWithCore = 1000;
constexpr int kYieldsWithCore = 200;
constexpr int kYieldsCrowded = 500;
// After yields without success, this many waits do not yield: ranks that yield to each other keep a
// core that another rank needs.
constexpr int kWaitsAfterVainYields = 16;

template <std::size_t kSize>
std::string text_of(const std::array<char, kSize>& chars) {
  return {chars.data(), strnlen(chars.data(), kSize)};
}

}  // namespace

PeerWatch::PeerWatch(const Segment& segment, int rank, std::chrono::nanoseconds timeout)
    : segment_(segment), rank_(rank), stillness_(segment.world_size(), timeout) {}

// Count the union of all ranks' affinity masks, so that bound and unbound ranks count alike.
void PeerWatch::count_cores() {
  CoreSet all;
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    const RankLine& line = segment_.line(rank);
    if (line.state.load() == RankState::kAbsent) return;  // count again once all ranks have joined
    all |= line.cores;
  }
  has_counted_cores_ = true;
  const int cores = std::max(1, static_cast<int>(all.count()));
  ranks_per_core_ = (segment_.world_size() + cores - 1) / cores;
  has_core_per_rank_ = ranks_per_core_ == 1;
  num_pauses_ = has_core_per_rank_ ? kPausesWithCore : kPausesCrowded;
}

void PeerWatch::begin_call(bool is_background) {
  if (!has_counted_cores_) count_cores();
  is_background_ = is_background;
  peers_have_come_ = false;
  stillness_.forget();
  RankLine& line = segment_.line(rank_);
  line.core.store(current_core(), std::memory_order_relaxed);
  line.heard_ns.store(Clock::now().time_since_epoch() / 1ns, std::memory_order_relaxed);
}

// The kernel may wake several ranks on one core. Ranks with high numbers then move to another core.
void PeerWatch::keep_apart() {
  const int core = current_core();
  if (core < 0) return;
  segment_.line(rank_).core.store(core, std::memory_order_relaxed);
  int others = 0;
  for (int lower = 0; lower < rank_; ++lower) {
    others += segment_.line(lower).core.load(std::memory_order_relaxed) == core ? 1 : 0;
  }
  if (others < ranks_per_core_) return;
  move_off_core(core);
  segment_.line(rank_).core.store(current_core(), std::memory_order_relaxed);
}

bool PeerWatch::wait_slowly(Flag& flag, std::uint32_t wanted, int peer, const char* what) {
  before_wait();
  if (pause_for(flag.value, wanted, num_pauses() - kPausesAtOnce)) return true;
  keep_apart();
  // A background call skips yields in its first wait, in which a peer may still run backward.
  if (is_background_ && !peers_have_come_) {
    peers_have_come_ = true;
  } else if (waits_without_yields_ > 0) {
    --waits_without_yields_;
  } else if (yield_for_flag(flag, wanted, has_core_per_rank_ ? kYieldsWithCore : kYieldsCrowded,
                            waits_without_yields_)) {
    return true;
  } else if (!has_core_per_rank_ && waits_without_yields_ == 0) {
    waits_without_yields_ = kWaitsAfterVainYields;
  }
  awaited_what_.store(what, std::memory_order_relaxed);
  awaited_peer_.store(peer, std::memory_order_release);
  const bool arrived = nap_for_flag(
      flag, wanted, stillness_.nap(), [&] { return give_up(flag, wanted, peer, what); },
      Scope::kProcesses);
  awaited_peer_.store(-1, std::memory_order_relaxed);
  return arrived;
}

std::string PeerWatch::awaited() const {
  const int peer = awaited_peer_.load(std::memory_order_acquire);
  if (peer < 0) return "";
  return join(name_of(peer), " ", awaited_what_.load(std::memory_order_relaxed));
}

bool PeerWatch::give_up(const Flag& flag, std::uint32_t wanted, int peer, const char* what) {
  segment_.line(rank_).heard_ns.store(Clock::now().time_since_epoch() / 1ns,
                                      std::memory_order_relaxed);
  if (on_nap_) {
    try {
      on_nap_();
    } catch (...) {
      report(ErrorKind::kState, join(name_of(rank_), " was interrupted while it waited for ",
                                     name_of(peer), " ", what));
      throw;
    }
  }
  // Check this before is_lost(): a rank that reported a failure may have exited without causing it.
  if (adopt_shared_failure()) return true;
  return is_lost(flag, wanted, peer, what) || is_late(peer, what);
}

const char* PeerWatch::how_gone(int rank) const {
  if (has_left(rank)) return "has left the group";
  return is_alive(segment_.line(rank).process) ? nullptr : "is gone";
}

int PeerWatch::first_gone(const std::vector<int>& ranks) const {
  for (const bool who_left : {false, true}) {
    for (const int rank : ranks) {
      if (has_left(rank) == who_left && how_gone(rank) != nullptr) return rank;
    }
  }
  return -1;
}

bool PeerWatch::is_lost(const Flag& flag, std::uint32_t wanted, int peer, const char* what) {
  const char* how = how_gone(peer);
  // A peer that set the flag before it exited is not lost.
  if (how == nullptr || reached(flag.value.load(std::memory_order_acquire), wanted)) return false;
  report(ErrorKind::kPeerLost,
         join(waited_for(peer, what), ", which ", how, "; ", last_call_of(peer)));
  return true;
}

std::string PeerWatch::shared_failure() const {
  const SharedFailure& shared = segment_.failure();
  const bool is_there = shared.state.load(std::memory_order_acquire) == SharedFailure::kThere;
  return is_there ? text_of(shared.text) : "";
}

void PeerWatch::check_peers(const std::vector<int>& peers) const {
  // Check exits before reading the failure: a rank publishes its failure before it exits.
  const int gone = first_gone(peers);
  const SharedFailure& shared = segment_.failure();
  if (shared.state.load(std::memory_order_acquire) == SharedFailure::kThere) {
    throw Error(shared.kind, text_of(shared.text));
  }
  if (gone >= 0) {
    throw Error(ErrorKind::kPeerLost,
                join(name_of(gone), " ", how_gone(gone), "; ", last_call_of(gone)));
  }
}

bool PeerWatch::is_late(int peer, const char* what) {
  stillness_.look(rank_, [this](int rank) { return mark_of(rank); });
  const int culprit = most_behind(peer);
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    if (lead(rank, culprit) > 0) stillness_.excuse(rank);
  }
  if (!stillness_.is_late(culprit)) return false;
  const double seconds = std::chrono::duration<double>(stillness_.timeout()).count();
  report(ErrorKind::kTimeout,
         join(waited_for(culprit, culprit == peer ? what : "to catch up"), " for ", seconds, " s; ",
              last_call_of(culprit), last_heard_of(culprit)));
  return true;
}

std::uint64_t PeerWatch::mark_of(int rank) const {
  const RankLine& line = segment_.line(rank);
  std::uint64_t mark = line.progress.load(std::memory_order_relaxed);
  mark += line.announced.value.load(std::memory_order_relaxed);
  return mark + line.reduced.value.load(std::memory_order_relaxed);
}

std::uint64_t PeerWatch::progress() const {
  std::uint64_t all = 0;
  for (int rank = 0; rank < segment_.world_size(); ++rank) all += mark_of(rank);
  return all;
}

// Return the rank with the lowest counters; among equals, the one longest without progress.
int PeerWatch::most_behind(int suspect) const {
  int last = suspect;
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    if (rank == rank_) continue;
    const std::int32_t ahead = lead(rank, last);
    if (ahead < 0 || (ahead == 0 && stillness_.still(rank) > stillness_.still(last))) last = rank;
  }
  return last;
}

std::string PeerWatch::last_heard_of(int rank) const {
  const Deadline heard{
      std::chrono::nanoseconds(segment_.line(rank).heard_ns.load(std::memory_order_relaxed))};
  const Deadline last = std::max(heard, stillness_.moved_at(rank));
  if (last == Deadline{}) return "";
  return join(", last heard of ", static_cast<double>((Clock::now() - last) / 100ms) * 0.1,
              " s ago");
}

std::string PeerWatch::waited_for(int peer, const char* what) const {
  return join(last_call(rank_).text(), " over ", segment_.world_size(), " ranks: rank ",
              global_rank(rank_), " waited for ", name_of(peer), " ", what);
}

std::string PeerWatch::name_of(int rank) const {
  const RankLine& line = segment_.line(rank);
  return join("rank ", global_rank(rank), " (process ", line.process.pid, " on ",
              text_of(line.host), ")");
}

std::string PeerWatch::last_call_of(int rank) const {
  const CallRecord& last = last_call(rank);
  if (last.sequence == 0) return "it has called nothing yet";
  return join("its last was ", last.text());
}

void PeerWatch::report(ErrorKind kind, const std::string& text) {
  if (failed() || process_.forked()) return;
  kind_ = kind;
  failure_ = text;
  tell_failure(segment_, kind, text);
}

void tell_failure(const Segment& segment, ErrorKind kind, const std::string& text) {
  SharedFailure& shared = segment.failure();
  std::uint32_t none = SharedFailure::kNone;
  if (!shared.state.compare_exchange_strong(none, SharedFailure::kWriting)) return;
  // Other ranks report a CUDA error of this rank as kState, since their devices are fine.
  const bool concerns_all =
      kind == ErrorKind::kTimeout || kind == ErrorKind::kPeerLost || kind == ErrorKind::kArgument;
  shared.kind = concerns_all ? kind : ErrorKind::kState;
  std::size_t size = std::min(text.size(), shared.text.size() - 1);
  const auto continues = [](char byte) { return (byte & 0xC0) == 0x80; };
  while (size > 0 && size < text.size() && continues(text[size]))
    --size;  // never cut inside a UTF-8 character
  std::memcpy(shared.text.data(), text.data(), size);
  shared.text[size] = '\0';
  shared.state.store(SharedFailure::kThere, std::memory_order_release);
}

bool PeerWatch::adopt_shared_failure() {
  SharedFailure& shared = segment_.failure();
  if (shared.state.load(std::memory_order_acquire) != SharedFailure::kThere) return false;
  if (failed()) return true;
  kind_ = shared.kind;
  failure_ = text_of(shared.text);
  return true;
}

}  // namespace pyringar
