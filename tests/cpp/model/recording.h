// recording: the ranks' programs as straight lines of events on shared memory, and which of a
// rank's events must follow which.
//
// Contract  A recorder runs a template of csrc/core once per rank, one rank after the other, and
//           says what happens to shared memory: write and read a part of a slot, publish a counter,
//           wait for one. No event depends on a value, so that a rank's program is one line; a
//           wrong value is a violation and ends the search.
//           The contents of a word are named by a version: how many of its writes have reached
//           memory. A word that belongs to nobody is written by several ranks, in the order of its
//           messages; a write that reaches memory before the one before it is a violation.
//           A write says what it is: which message, and added up from which ranks, by naming the
//           reads it is made of. finish() follows these names through all ranks: where every read
//           finds the message it is meant to find, which the search proves, the sums are what
//           finish() computed, and it complains of contributions lost or doubled.
// Memory    What a rank's events keep of program order, and all that they keep:
//
//             a release publish     after everything older of its rank
//             an acquire wait       before everything younger of its rank
//             any wait              before younger writes and publishes (they hang on its branch)
//             one word              writes in order, reads in order
//             data                  a write after the reads it is made of
//
//           A write is an event when it leaves the rank's store buffer; when it entered the buffer,
//           nobody can see. The buffer is not bounded, younger reads and waits overtake what is in
//           it, and a rank's reads of its own words find the youngest write, buffered or not. Reads
//           may be late too, until the next release: weaker than store buffers alone, weaker than
//           x86 and Arm64, as weak as C++'s release and acquire between words with one writer.
//           All ranks see a write at the same moment, as on every CPU that torch runs on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pyringar::model {

enum class Action { kWrite, kRead, kPublish, kWait };
enum class Stage { kNothing, kCall, kPart, kSum };

// What a part of a slot holds, or a call's record. Messages are numbered from 1, wherever the
// counters began; so are calls.
struct Value {
  std::uint32_t message = 0;
  Stage stage = Stage::kNothing;
  std::vector<int> ranks{};  // whose contributions have been added up
};

struct Word {
  std::string place;                    // "slot 2 of rank 0", "announced of rank 1"
  std::string part;                     // "slice 1, half 0"; of counters, records ""
  int owner;                            // who writes it; or kNobody
  std::vector<Value> values{};          // by version, 0: nothing yet
  std::vector<std::uint32_t> counts{};  // the same of a counter
  std::vector<std::size_t> writes{};    // events, in order
};

inline constexpr int kNobody = -1;  // owns a word
inline constexpr std::size_t kNever = static_cast<std::size_t>(-1);

struct Event {
  Action action;
  int rank;
  std::size_t word;
  bool ordered = true;         // a publish that releases, a wait that acquires
  std::size_t version = 0;     // of a write: which it makes; of a read: which it is meant to find
  Value meant{};               // of a read
  std::uint32_t wanted = 0;    // of a wait
  std::vector<bool> passes{};  // of a wait: at which versions of its counter
  std::vector<std::size_t> after{};   // events of this rank that come first
  std::vector<std::size_t> before{};  // events of this rank that wait for this one
};

// Contributions: ranks' own, and all that was read.
struct Sum {
  std::vector<int> own{};
  std::vector<std::size_t> reads{};
};

class Recording {
 public:
  explicit Recording(int num_ranks) : num_ranks_(num_ranks) {}

  std::size_t word(const std::string& place, const std::string& part, int owner);
  std::size_t counter(const std::string& place, int owner, std::uint32_t start);

  // What was read, for Sum.
  std::size_t read(int rank, std::size_t word, std::uint32_t message, Stage stage);
  void write(int rank, std::size_t word, std::uint32_t message, Stage stage, const Sum& sum);
  void publish(int rank, std::size_t word, std::uint32_t count, bool releases);
  void wait(int rank, std::size_t word, std::uint32_t wanted, bool acquires, bool wraps);
  // The rank takes a result into its own tensor.
  void keep(int rank, const std::string& what, const Sum& sum, const std::vector<int>& expected);
  // Which elements a message carries: the writer says so, and the reader relies on it.
  void give_range(const std::string& place, std::uint32_t message, std::size_t begin,
                  std::size_t end);
  void expect_range(int rank, const std::string& place, std::uint32_t message, std::size_t begin,
                    std::size_t end);
  void complain(const std::string& complaint) { complaints_.push_back(complaint); }

  // After the last rank's program: versions, sums, order.
  void finish();

  int num_ranks() const { return num_ranks_; }
  const std::vector<Event>& events() const { return events_; }
  const std::vector<Word>& words() const { return words_; }
  const std::vector<std::string>& complaints() const { return complaints_; }
  // "rank 1: reads slot 2 of rank 0, message 5, half 1"
  std::string show(std::size_t event) const;
  static std::string show(const Value& value);

 private:
  struct Source {  // a read, also of a rank's own word
    std::size_t word;
    Value meant;
    std::size_t event;     // kNever: the rank's own word
    std::size_t own_seen;  // the version a rank finds in its own word
    int rank;
  };
  struct Kept {
    int rank;
    std::string what;
    Sum sum;
    std::vector<int> expected;
  };
  struct Carried {
    int rank;
    std::string place;
    std::uint32_t message;
    std::size_t begin;
    std::size_t end;
  };
  struct Pending {  // a write's sum, until finish() knows the others
    std::size_t word;
    std::size_t version;
    Sum sum;
    bool is_done;
  };

  std::size_t version_of(std::size_t word, const Value& meant) const;
  std::vector<int> add_up(const Sum& sum);
  void order_versions();
  void resolve_reads();
  void resolve_waits();
  void resolve_ranges();
  void order_rank(std::size_t begin, std::size_t end);
  bool stays_before(std::size_t older, std::size_t younger) const;

  int num_ranks_;
  std::vector<Word> words_;
  std::vector<Event> events_;
  std::vector<Source> sources_;
  std::vector<Pending> pending_;
  std::vector<std::vector<std::size_t>> data_;  // by event: the reads a write is made of
  std::vector<Kept> kept_;
  std::vector<Carried> given_;
  std::vector<Carried> expected_;
  std::vector<bool> wraps_;  // by event
  std::vector<std::string> complaints_;
};

}  // namespace pyringar::model
