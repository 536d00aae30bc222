// explore: every order in which a recording's events can reach memory, or one of every set of
// orders that differ only in neighbours which do not mind each other.
//
// Contract  A state is the set of events that have happened; nothing else can differ, as every word
//           has one writer and no event depends on a value. States are remembered as 128 bits: the
//           exclusive or of a random number per event. Among 10^8 states, two share one with a
//           probability below 10^-22; only then could a state be passed over.
//           The states form a graph without cycles, since an event happens once.
// Reduction kNone tries every event in every state.
//           kPayload takes a read or a write alone, and puts off all others, where no event that
//           could possibly happen before it touches the same word from the other side: a persistent
//           set of one event (Godefroid 1996), computed in every state, by letting everything
//           happen that can happen without this event. No bug is assumed away: a program without
//           waits is one where everything can. Publishes and waits are tried in every order. kAll
//           does the same with publishes and waits, which only grow and only let pass: once a wait
//           may end it may always end, so it minds no other event. Where a wait's comparison is not
//           like that (checked for every wait), it is as kPayload. A graph without cycles needs
//           nothing more for every violation and every deadlock to be found; the tests compare the
//           three on programs small enough for kNone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "recording.h"

namespace pyringar::model {

enum class Reduction { kNone, kPayload, kAll };

struct Verdict {
  bool is_proved = false;
  std::size_t num_states = 0;
  std::string report{};  // of a violation: numbered steps, then what is wrong
};

Verdict explore(const Recording& recording, Reduction reduction, std::size_t most_states);

}  // namespace pyringar::model
