// memory: see the header.

#include "memory.h"

#include <algorithm>
#include <cstring>

#include "fault.h"

namespace pyringar::ptx {

namespace {

constexpr std::size_t kStory = 8;  // lines of a report
constexpr std::size_t kRemembered = 4096;
constexpr unsigned kMostStale = 8;  // in the end, everybody sees what was written

constexpr bool acquires(Strength s) {
  return s == Strength::kAcquire || s == Strength::kAcquireRelease;
}
constexpr bool releases(Strength s) {
  return s == Strength::kRelease || s == Strength::kAcquireRelease;
}

}  // namespace

// -- clocks ---------------------------------------------------------------------------------------

std::uint32_t Clock::operator[](std::uint32_t key) const {
  const auto found = std::lower_bound(entries_.begin(), entries_.end(), std::pair(key, 0u));
  return found != entries_.end() && found->first == key ? found->second : 0;
}

void Clock::raise(std::uint32_t key, std::uint32_t to) {
  const auto found = std::lower_bound(entries_.begin(), entries_.end(), std::pair(key, 0u));
  if (found != entries_.end() && found->first == key) {
    found->second = std::max(found->second, to);
  } else {
    entries_.insert(found, {key, to});
  }
}

void Clock::join(const Clock& other) {
  for (const auto& [key, to] : other.entries_) raise(key, to);
}

void Knowledge::join(const Knowledge& other) {
  phases.join(other.phases);
  threads.join(other.threads);
  seen.join(other.seen);
}

// -- regions --------------------------------------------------------------------------------------

void Memory::add_region(const void* begin, std::size_t bytes, std::string name) {
  if (bytes == 0) return;
  const auto at = reinterpret_cast<std::uintptr_t>(begin);
  // What was there before has been given back, and this is new.
  std::erase_if(regions_, [&](const auto& other) {
    return other.first < at + bytes && at < other.first + other.second.bytes;
  });
  regions_[at] = {bytes, std::move(name), {}};
  last_region_ = nullptr;
}

void Memory::remove_region(const void* begin) {
  const auto found = regions_.find(reinterpret_cast<std::uintptr_t>(begin));
  if (found == regions_.end()) return;
  const auto& [address, region] = *found;
  std::erase_if(more_readers_, [&, begins = address, bytes = region.bytes](const auto& of) {
    return of.first - begins < bytes;
  });
  regions_.erase(found);
  last_region_ = nullptr;
}

Memory::Cell* Memory::cells(std::uintptr_t at, std::size_t bytes, const char* verb,
                            std::uint32_t thread, const Access& access) {
  Place* place = last_region_;
  if (place == nullptr || at - place->first >= place->second.bytes) {
    const auto behind = regions_.upper_bound(at);
    place = behind == regions_.begin() ? nullptr : &*std::prev(behind);
  }
  if (place == nullptr || at < place->first || at + bytes > place->first + place->second.bytes) {
    fault(name_of(thread), " ", verb, " ", bytes, " bytes that are nobody's, at ",
          name_of_address(at), "\n  ", access.name, " at ", place_name(access.place), "\n");
  }
  last_region_ = place;
  Region& region = place->second;
  if (region.cells.empty()) region.cells.resize(region.bytes);
  return &region.cells[at - place->first];
}

std::string Memory::name_of_address(std::uintptr_t at) const {
  const auto behind = regions_.upper_bound(at);
  if (behind == regions_.begin()) return join("", "address ", at);
  const auto& [begin, region] = *std::prev(behind);
  const std::size_t offset = at - begin;
  if (offset < region.bytes) return join("", region.name, " + ", offset);
  return join("", offset - region.bytes, " bytes behind ", region.name);
}

// -- threads --------------------------------------------------------------------------------------

std::uint32_t Memory::add_block(std::string name, int device, unsigned num_threads,
                                const Knowledge& known) {
  const auto block = static_cast<std::uint32_t>(blocks_.size());
  const auto first = static_cast<std::uint32_t>(threads_.size());
  blocks_.push_back({std::move(name), device, first, num_threads, 0, 0, known});
  for (unsigned i = 0; i < num_threads; ++i) threads_.emplace_back().block = block;
  return block;
}

std::string Memory::name_of(std::uint32_t thread) const {
  const Block& block = blocks_[threads_[thread].block];
  return join("", block.name, " thread ", thread - block.first_thread);
}

const Knowledge& Memory::known(const Thread& self) const {
  return self.own != nullptr ? *self.own : blocks_[self.block].known;
}

Knowledge& Memory::own(Thread& self) {
  if (self.own == nullptr) self.own = std::make_unique<Knowledge>(blocks_[self.block].known);
  return *self.own;
}

void Memory::collect(std::uint32_t block, Knowledge& into) const {
  const Block& self = blocks_[block];
  into.join(self.known);
  for (std::uint32_t i = 0; i < self.num_threads; ++i) {
    const Thread& thread = threads_[self.first_thread + i];
    if (thread.own != nullptr) into.join(*thread.own);
  }
  into.phases.raise(block, self.phase + 1);
}

void Memory::forget() {
  blocks_.clear();
  threads_.clear();
  events_.resize(1);
  for (auto& [begin, region] : regions_) region.cells.clear();
  more_readers_.clear();
  words_.clear();
  told_.clear();
}

void Memory::barrier(std::uint32_t block) {
  Block& self = blocks_[block];
  for (std::uint32_t i = 0; i < self.num_threads; ++i) {
    Thread& thread = threads_[self.first_thread + i];
    thread.event = 0;
    if (thread.own == nullptr) continue;
    self.known.join(*thread.own);
    thread.own.reset();
  }
  self.known.phases.raise(block, ++self.phase);
  self.event = 0;
}

// All that the thread did and knows, for those who will learn of it.
Memory::Release Memory::hand_on(std::uint32_t thread, Scope scope, bool is_of_word) {
  Thread& self = threads_[thread];
  Knowledge& knowledge = own(self);
  knowledge.threads.raise(thread, ++self.time);
  self.event = 0;
  return {std::make_shared<const Knowledge>(knowledge), scope, thread, is_of_word};
}

// Whether an event is before what the thread does now.
bool Memory::knows(std::uint32_t thread, std::uint32_t event) const {
  if (event == 0) return true;
  const Event& e = events_[event];
  if (e.thread == thread) return true;
  const Thread& self = threads_[thread];
  const Block& block = blocks_[self.block];
  if (e.block == self.block && e.phase < block.phase) return true;
  if (e.block == block.last_block && e.phase < block.last_phases) return true;
  const Knowledge& knowledge = known(self);
  const std::uint32_t phases = knowledge.phases[e.block];
  if (self.own == nullptr) {
    block.last_block = e.block;
    block.last_phases = phases;
  }
  if (e.phase < phases) return true;
  return e.thread != kWholeBlock && e.time < knowledge.threads[e.thread];
}

// Whether a scope, around one thread, has the other one in it.
bool Memory::includes(Scope scope, std::uint32_t thread, std::uint32_t other) const {
  const std::uint32_t own = threads_[thread].block;
  const std::uint32_t others = threads_[other].block;
  if (scope == Scope::kSystem) return true;
  return scope == Scope::kBlock ? own == others : blocks_[own].device == blocks_[others].device;
}

// -- races ----------------------------------------------------------------------------------------

// Whether an access and an earlier one of the same byte are no race.
bool Memory::is_ordered(std::uint32_t thread, const Access& access, const Mark& mark) const {
  if (knows(thread, mark.event)) return true;
  const std::uint32_t other = events_[mark.event].thread;
  if (access.strength == Strength::kWeak || mark.is_strong == 0 || other == kWholeBlock) {
    return false;
  }
  return includes(access.scope, thread, other) &&
         includes(static_cast<Scope>(mark.scope), other, thread);
}

Memory::Mark Memory::mark_of(std::uint32_t thread, const Access& access) {
  Thread& self = threads_[thread];
  if (self.event == 0) {
    self.event = static_cast<std::uint32_t>(events_.size());
    events_.push_back({thread, self.block, blocks_[self.block].phase, self.time});
  }
  Mark mark;
  mark.event = self.event;
  mark.place = access.place;
  mark.is_strong = access.strength != Strength::kWeak;
  mark.scope = static_cast<std::uint32_t>(access.scope);
  return mark;
}

std::uint32_t Memory::event_of_block(std::uint32_t block) {
  Block& self = blocks_[block];
  if (self.event == 0) {
    self.event = static_cast<std::uint32_t>(events_.size());
    events_.push_back({kWholeBlock, block, self.phase, 0});
  }
  return self.event;
}

// Readers that are before this one need not be kept: who is after this one is after them.
void Memory::add_reader(std::uint32_t thread, Cell& cell, std::uintptr_t at, const Access& access) {
  const std::uint32_t block = threads_[thread].block;
  const Mark mark = mark_of(thread, access);
  if (cell.readers[0].event == mark.event) return;
  for (Mark& reader : cell.readers) {
    if (knows(thread, reader.event)) {
      reader = mark;
      return;
    }
    const Event& e = events_[reader.event];
    if (e.block != block || e.phase != blocks_[block].phase) continue;
    if (mark.is_strong == 0 && reader.is_strong == 0) {
      reader.event = event_of_block(block);
      return;
    }
  }
  more_readers_[at].push_back(std::exchange(cell.readers[kReaders - 1], mark));
}

void Memory::check(std::uint32_t thread, std::uintptr_t at, const char* verb, const Access& access,
                   const Mark& other, const char* others_verb) const {
  if (!is_ordered(thread, access, other)) report(thread, at, verb, access, other, others_verb);
}

void Memory::report(std::uint32_t thread, std::uintptr_t at, const char* verb, const Access& access,
                    const Mark& other, const char* others_verb) const {
  const Event& e = events_[other.event];
  const std::string who = e.thread != kWholeBlock ? name_of(e.thread) : blocks_[e.block].name;
  fault("a race on ", name_of_address(at), ":\n  ", name_of(thread), " ", verb, " it at ",
        place_name(access.place), ", ", access.name, ",\n  ", who, " ", others_verb, " it at ",
        place_name(other.place), ", and nothing orders the two\n",
        story({threads_[thread].block, e.block}));
}

void Memory::read(std::uint32_t thread, std::uintptr_t from, std::size_t bytes,
                  const Access& access) {
  Cell* const cells = this->cells(from, bytes, "reads", thread, access);
  const std::uint32_t blocks_event = blocks_[threads_[thread].block].event;
  const bool is_weak = access.strength == Strength::kWeak;
  std::uint32_t checked = 0;  // the writer of the byte before, as a rule
  for (std::size_t i = 0; i < bytes; ++i) {
    Cell& cell = cells[i];
    if (cell.write.event != checked) {
      check(thread, from + i, "reads", access, cell.write, "writes");
      checked = cell.write.event;
    }
    const bool is_noted = is_weak && blocks_event != 0 && cell.readers[0].event == blocks_event;
    if (!is_noted) add_reader(thread, cell, from + i, access);
  }
}

void Memory::write(std::uint32_t thread, std::uintptr_t to, std::size_t bytes,
                   const Access& access) {
  Cell* const cells = this->cells(to, bytes, "writes", thread, access);
  const Mark mark = mark_of(thread, access);
  for (std::size_t i = 0; i < bytes; ++i) {
    Cell& cell = cells[i];
    check(thread, to + i, "writes", access, cell.write, "writes");
    for (const Mark& reader : cell.readers) {
      check(thread, to + i, "writes", access, reader, "reads");
    }
    if (cell.readers[kReaders - 1].event != 0) {
      const auto more = more_readers_.find(to + i);
      if (more != more_readers_.end()) {
        for (const Mark& reader : more->second) {
          check(thread, to + i, "writes", access, reader, "reads");
        }
        more_readers_.erase(more);
      }
    }
    cell = {mark, {}};
  }
}

// -- words ----------------------------------------------------------------------------------------

Memory::Word& Memory::word(std::uint32_t thread, std::uintptr_t at) {
  std::uint32_t now = 0;
  std::memcpy(&now, reinterpret_cast<const void*>(at), sizeof now);
  const auto number = static_cast<std::uint32_t>(words_.size());
  const auto [found, is_new] = words_.try_emplace(at, Word{number, {}});
  Word& word = found->second;
  if (is_new || word.messages.back().value != now) {
    // What a weak write has put there is before whoever asks: the check has said so.
    own(threads_[thread]).seen.raise(word.number, static_cast<std::uint32_t>(word.messages.size()));
    word.messages.push_back({now, 0, Scope::kSystem, {}});
  }
  return word;
}

std::uint32_t Memory::load(std::uint32_t thread, std::uintptr_t at, const Access& access) {
  read(thread, at, kWordBytes, access);
  Thread& self = threads_[thread];
  const Word& word = this->word(thread, at);
  const std::size_t newest = word.messages.size() - 1;
  const std::size_t oldest = known(self).seen[word.number];
  const std::size_t back = self.num_stale < kMostStale ? chooser_.choose(newest - oldest + 1) : 0;
  self.num_stale = back == 0 ? 0 : self.num_stale + 1;
  return take(thread, at, word, newest - back, access);
}

std::uint32_t Memory::take_newest(std::uint32_t thread, std::uintptr_t at, const Access& access) {
  const Word& word = this->word(thread, at);
  return take(thread, at, word, word.messages.size() - 1, access);
}

std::uint32_t Memory::take(std::uint32_t thread, std::uintptr_t at, const Word& word,
                           std::size_t number, const Access& access) {
  Thread& self = threads_[thread];
  const Message& message = word.messages[number];
  own(self).seen.raise(word.number, static_cast<std::uint32_t>(number));
  tell(thread, at, message.value, access);
  const auto is_met = [&] {
    return includes(access.scope, thread, message.thread) &&
           includes(message.scope, message.thread, thread);
  };
  const bool is_acquire = acquires(access.strength);
  if (!message.releases.empty() && is_met()) {
    for (const Release& release : message.releases) {
      if (!includes(release.scope, release.thread, thread)) continue;
      if (is_acquire) {
        acquire(thread, release, access.scope);
      } else {
        self.unfenced.emplace_back(at, release);
      }
    }
  }
  // A relaxed read of the word before is part of the pattern (8.8).
  for (const auto& [of, release] : self.unfenced) {
    if (is_acquire && of == at) acquire(thread, release, access.scope);
  }
  return message.value;
}

void Memory::acquire(std::uint32_t thread, const Release& release, Scope scope) {
  if (includes(scope, thread, release.thread)) own(threads_[thread]).join(*release.known);
}

void Memory::store(std::uint32_t thread, std::uintptr_t at, std::uint32_t value,
                   const Access& access) {
  write(thread, at, kWordBytes, access);
  put(thread, at, value, access, false);
}

// An update hands on what the value before it did (8.9.2, observation order).
void Memory::put(std::uint32_t thread, std::uintptr_t at, std::uint32_t value, const Access& access,
                 bool is_update) {
  Thread& self = threads_[thread];
  Word& word = this->word(thread, at);
  Message message{value, thread, access.scope, {}};
  if (is_update) message.releases = word.messages.back().releases;
  // Stores behind a release of the word go on with it (8.8).
  const auto last = std::find_if(word.messages.rbegin(), word.messages.rend(),
                                 [&](const Message& m) { return m.thread == thread; });
  if (last != word.messages.rend()) {
    for (const Release& release : last->releases) {
      if (release.thread == thread && release.is_of_word) message.releases.push_back(release);
    }
  }
  if (self.fenced.known != nullptr) message.releases.push_back(self.fenced);
  if (releases(access.strength)) message.releases.push_back(hand_on(thread, access.scope, true));
  own(self).seen.raise(word.number, static_cast<std::uint32_t>(word.messages.size()));
  word.messages.push_back(std::move(message));
  std::memcpy(reinterpret_cast<void*>(at), &value, sizeof value);
  ++num_stores_;
  tell(thread, at, value, access);
}

void Memory::fence(std::uint32_t thread, const Access& access) {
  Thread& self = threads_[thread];
  for (const auto& [at, release] : self.unfenced) acquire(thread, release, access.scope);
  self.unfenced.clear();
  self.fenced = hand_on(thread, access.scope, false);
  tell(thread, 0, 0, access);
}

// -- reports --------------------------------------------------------------------------------------

void Memory::tell(std::uint32_t thread, std::uintptr_t at, std::uint32_t value,
                  const Access& access) {
  // A loop that waits says nothing new.
  Thread& self = threads_[thread];
  const bool is_same =
      self.told_at == at && self.told_value == value && self.told_place == access.place;
  self.told_at = at;
  self.told_value = value;
  self.told_place = access.place;
  if (is_same) return;
  told_.push_back({thread, at, value, access});
  if (told_.size() > kRemembered) told_.pop_front();
}

std::string Memory::story(std::vector<std::uint32_t> blocks) const {
  std::vector<std::string> lines;
  for (auto told = told_.rbegin(); told != told_.rend() && lines.size() < kStory; ++told) {
    const std::uint32_t block = threads_[told->thread].block;
    if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) continue;
    const auto value = static_cast<std::int32_t>(told->value);  // counters begin where they like
    const std::string where =
        told->at == 0 ? "" : join("", " ", name_of_address(told->at), " = ", value);
    lines.push_back(join("", "  ", name_of(told->thread), ": ", told->access.name, where, " at ",
                         place_name(told->access.place), "\n"));
  }
  std::string text = lines.empty() ? "" : "their last strong accesses, in order:\n";
  for (auto line = lines.rbegin(); line != lines.rend(); ++line) text += *line;
  return text;
}

}  // namespace pyringar::ptx
