// check: helpers of all stress tests: CHECK, random numbers, guarded memory, threads.
//
// Contract  A failed CHECK prints file, line, condition, values, and the options that repeat the
//           round. It then ends the process with status 1.
// Threads   CHECK: any. A Random belongs to one thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/error.h"

namespace pyringar::stress {

[[noreturn]] void fail_check(const char* file, int line, const char* condition,
                             const std::string& values);

#define CHECK(condition, ...)                                            \
  do {                                                                   \
    if (!(condition)) {                                                  \
      ::pyringar::stress::fail_check(__FILE__, __LINE__, #condition,     \
                                     ::pyringar::join("", __VA_ARGS__)); \
    }                                                                    \
  } while (false)

// The round that a failure message says to repeat.
struct Position {
  const char* part;
  std::uint64_t seed;
  std::uint64_t round;
};
void set_position(const Position& position);

// SplitMix64 (Steele, Lea, Flood 2014). Any seed is valid, 0 too.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}

  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(bits() % n); }
  int between(int lowest, int highest) {
    return lowest + static_cast<int>(below(static_cast<std::size_t>(highest - lowest) + 1));
  }
  bool one_in(int n) { return below(static_cast<std::size_t>(n)) == 0; }
  Random fork() { return Random(bits()); }
  // Return one random generator per rank.
  std::vector<Random> forks(int count) {
    std::vector<Random> made;
    for (int i = 0; i < count; ++i) made.push_back(fork());
    return made;
  }

 private:
  std::uint64_t state_;
};

// kLong: a timeout that is never reached. kGraceSeconds: delay that a busy machine may cause.
inline constexpr std::chrono::nanoseconds kLong = std::chrono::minutes(10);
inline constexpr double kGraceSeconds = 10.0;

// Random number of elements: 0, a few, about one vector, about one block, rarely up to `most`.
std::size_t random_numel(Random& random, std::size_t most);

// Random delay: usually none, sometimes a yield, rarely a sleep.
void dawdle(Random& random);

// Memory at any byte offset, with canaries before it. Behind it are canaries, or nothing in half
// the cases, so that AddressSanitizer sees an overrun.
class Guarded {
 public:
  // The memory begins `offset` bytes after a 16-byte boundary.
  Guarded(Random& random, std::size_t bytes, std::size_t offset);

  std::byte* data() const { return memory_.get() + before_; }
  std::size_t size() const { return size_; }
  void check_canaries() const;

 private:
  std::size_t size_;
  std::size_t before_;
  std::size_t behind_;
  std::unique_ptr<std::byte[]> memory_;
};

// Run program(rank) on one thread per rank.
void on_all_ranks(int world_size, const std::function<void(int rank)>& program);

// Run the program in a forked child. It must exit with status 0 within a minute.
void in_child(const std::function<void()>& program);

// Run action, which must throw an Error of this kind. Return its message.
std::string message_of(ErrorKind kind, const std::function<void()>& action);
// Run action, which must throw an Error of this kind with `words` in its message.
void check_throws(ErrorKind kind, std::string_view words, const std::function<void()>& action);

// For timing checks, which a busy machine may fail. attempt() returns "" or a complaint. Three
// complaints in a row fail.
void check_one_of_three(const std::function<std::string()>& attempt);

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace pyringar::stress
