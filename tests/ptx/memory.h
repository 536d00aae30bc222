// memory: what PTX promises of memory and, for what it does not promise, the worst that it allows.
//
// Contract  Weak accesses are judged: two that overlap, one of them a write, are a race unless one
//           happens before the other, and the first race is a Fault. A read that races with no
//           write has one value, so their bytes lie in the host's memory as they are; buffers of
//           stores and stale caches would show nothing else. A cache operator (.cg) says nothing of
//           order (PTX ISA 9.7.9.1).
//           Strong accesses may see old values: a word that one has touched keeps its history, and
//           a read takes any value that is not older than what its thread knows, as a Chooser says.
//
//             knowledge of a thread grows by   so that afterwards it knows
//             a barrier of its block           what all threads of the block did before, and knew
//             an acquire that reads a release  what the releasing thread did before, and knew
//             a fence, after relaxed reads     the same, for all those reads
//
//           Accesses that are strong do not race, and order what is around them, only if the scope
//           of each includes the other's thread.
//           Left out: values that are yet to be written (load buffering), writes of two words that
//           two threads see in different orders (2+2W: a word's history is the order of execution),
//           fence.sc, proxies, strong accesses of other sizes than four bytes. Reads of one byte by
//           threads of one block, between two of its barriers, count as the whole block's.
// Source    PTX ISA 9.0, chapter 8: morally strong 8.7, races 8.7.1, release and acquire
//           patterns 8.8, synchronization 8.9.4, causality order 8.9.5, axioms 8.10. Views:
//           Kang, Hur, Lahav, Vafeiadis, Dreyer, "A promising semantics for relaxed-memory
//           concurrency", POPL 2017. Races: Flanagan, Freund, "FastTrack", PLDI 2009.
// Tests     litmus_test.cpp
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "chooser.h"
#include "forms.h"

namespace pyringar::ptx {

struct Access {
  Strength strength = Strength::kWeak;
  Scope scope = Scope::kSystem;
  std::uint32_t place = 0;  // see place_name(), and what stands there, for people
  const char* name = "";
};

// Numbers by key, each the largest that was ever put there.
class Clock {
 public:
  std::uint32_t operator[](std::uint32_t key) const;
  void raise(std::uint32_t key, std::uint32_t to);
  void join(const Clock& other);

 private:
  std::vector<std::pair<std::uint32_t, std::uint32_t>> entries_;  // by ascending key
};

struct Knowledge {
  Clock phases;   // of block b all that is before its barrier number phases[b]
  Clock threads;  // of thread t all that is before its release number threads[t]
  Clock seen;     // of word w nothing older than its message number seen[w]

  void join(const Knowledge& other);
};
using Snapshot = std::shared_ptr<const Knowledge>;

class Memory {
 public:
  explicit Memory(Chooser& chooser) : chooser_(chooser) {}

  // Bytes of the host that programs may touch, and what people call them.
  void add_region(const void* begin, std::size_t bytes, std::string name);
  void remove_region(const void* begin);

  // A block whose threads know what was over before its launch. Threads are numbered one after
  // another from the first.
  std::uint32_t add_block(std::string name, int device, unsigned num_threads,
                          const Knowledge& known);
  std::uint32_t first_thread(std::uint32_t block) const { return blocks_[block].first_thread; }
  // All that a block did and knew, which is over.
  void collect(std::uint32_t block, Knowledge& into) const;
  // All blocks are over: what comes is behind all that was.
  void forget();

  // Weak accesses are checked, and their bytes left to the caller.
  void read(std::uint32_t thread, std::uintptr_t from, std::size_t bytes, const Access& access);
  void write(std::uint32_t thread, std::uintptr_t to, std::size_t bytes, const Access& access);
  // Strong ones are of words. An update takes the newest value, and change() gives what is written
  // in its place.
  std::uint32_t load(std::uint32_t thread, std::uintptr_t word, const Access& access);
  void store(std::uint32_t thread, std::uintptr_t word, std::uint32_t value, const Access& access);
  template <typename Change>
  std::uint32_t update(std::uint32_t thread, std::uintptr_t at, const Access& access,
                       const Change& change) {
    read(thread, at, kWordBytes, access);
    const std::uint32_t before = take_newest(thread, at, access);
    write(thread, at, kWordBytes, access);
    put(thread, at, change(before), access, true);
    return before;
  }
  void fence(std::uint32_t thread, const Access& access);
  void barrier(std::uint32_t block);  // all its threads have come

  // Messages written to any word: whoever waits has a reason to look again.
  std::uint64_t num_stores() const { return num_stores_; }
  // Whether the thread's last load missed a newer value.
  bool was_stale(std::uint32_t thread) const { return threads_[thread].num_stale > 0; }
  // Names, and the last strong accesses of a block, for reports.
  std::string name_of(std::uint32_t thread) const;
  std::string name_of_address(std::uintptr_t address) const;
  std::string story(std::vector<std::uint32_t> blocks) const;

 private:
  static constexpr std::size_t kWordBytes = 4;
  static constexpr std::uint32_t kWholeBlock = ~std::uint32_t{0};

  // What a fence or a release hands on, to those within its scope.
  struct Release {
    Snapshot known;
    Scope scope;
    std::uint32_t thread;
    bool is_of_word;  // a release of the word, no fence
  };
  struct Thread {
    std::uint32_t block;
    std::uint32_t time = 0;          // releases so far
    std::uint32_t event = 0;         // of what it does now; 0: none yet
    unsigned num_stale = 0;          // loads that missed a newer value, one after another
    std::unique_ptr<Knowledge> own;  // more than its block's, or none
    Release fenced{};                // what its stores hand on
    // What its next fence acquires, or its next acquire of the same word.
    std::vector<std::pair<std::uintptr_t, Release>> unfenced{};
    // What the story has of it last.
    std::uintptr_t told_at = 0;
    std::uint32_t told_value = 0;
    std::uint32_t told_place = 0;
  };
  struct Block {
    std::string name;
    int device;
    std::uint32_t first_thread;
    std::uint32_t num_threads;
    std::uint32_t phase = 0;  // barriers so far
    std::uint32_t event = 0;  // of all its threads in this phase
    Knowledge known;
    // What was looked up in it last, for it is asked again and again.
    mutable std::uint32_t last_block = 0;
    mutable std::uint32_t last_phases = 0;
  };
  // What a thread, or a block, does between two of its releases and two barriers of the block.
  struct Event {
    std::uint32_t thread;
    std::uint32_t block;
    std::uint32_t phase;
    std::uint32_t time;
  };
  // An access of a byte.
  struct Mark {
    std::uint32_t event = 0;  // 0: nobody's
    std::uint32_t place : 28 = 0;
    std::uint32_t is_strong : 1 = 0;
    std::uint32_t scope : 2 = 0;
  };
  static constexpr std::size_t kReaders = 2;
  struct Cell {
    Mark write;                // the last
    Mark readers[kReaders]{};  // since then
  };
  struct Region {
    std::size_t bytes;
    std::string name;
    std::vector<Cell> cells;
  };
  using Place = std::pair<const std::uintptr_t, Region>;
  struct Message {
    std::uint32_t value;
    std::uint32_t thread;
    Scope scope;
    std::vector<Release> releases;
  };
  struct Word {
    std::uint32_t number;
    std::vector<Message> messages;  // the first is what was there before
  };
  struct Told {
    std::uint32_t thread;
    std::uintptr_t at;
    std::uint32_t value;
    Access access;
  };

  const Knowledge& known(const Thread& self) const;
  Knowledge& own(Thread& self);
  bool knows(std::uint32_t thread, std::uint32_t event) const;
  bool includes(Scope scope, std::uint32_t thread, std::uint32_t other) const;
  bool is_ordered(std::uint32_t thread, const Access& access, const Mark& mark) const;
  Mark mark_of(std::uint32_t thread, const Access& access);
  std::uint32_t event_of_block(std::uint32_t block);
  void add_reader(std::uint32_t thread, Cell& cell, std::uintptr_t at, const Access& access);
  void check(std::uint32_t thread, std::uintptr_t at, const char* verb, const Access& access,
             const Mark& other, const char* others_verb) const;
  [[noreturn]] void report(std::uint32_t thread, std::uintptr_t at, const char* verb,
                           const Access& access, const Mark& other, const char* others_verb) const;
  Cell* cells(std::uintptr_t at, std::size_t bytes, const char* verb, std::uint32_t thread,
              const Access& access);
  Release hand_on(std::uint32_t thread, Scope scope, bool is_of_word);
  Word& word(std::uint32_t thread, std::uintptr_t at);
  void acquire(std::uint32_t thread, const Release& release, Scope scope);
  std::uint32_t take(std::uint32_t thread, std::uintptr_t at, const Word& word, std::size_t number,
                     const Access& access);
  std::uint32_t take_newest(std::uint32_t thread, std::uintptr_t at, const Access& access);
  void put(std::uint32_t thread, std::uintptr_t at, std::uint32_t value, const Access& access,
           bool is_update);
  void tell(std::uint32_t thread, std::uintptr_t at, std::uint32_t value, const Access& access);

  Chooser& chooser_;
  std::vector<Block> blocks_;
  std::vector<Thread> threads_;
  std::vector<Event> events_{{}};
  std::map<std::uintptr_t, Region> regions_;
  Place* last_region_ = nullptr;
  std::unordered_map<std::uintptr_t, std::vector<Mark>> more_readers_;
  std::unordered_map<std::uintptr_t, Word> words_;
  std::deque<Told> told_;
  std::uint64_t num_stores_ = 0;
};

}  // namespace pyringar::ptx
