// explore: every order in which a recording's events can reach memory, or one of every set of
// orders that differ only in neighbours which do not mind each other.
//
// Contract  A state is the set of events that have happened; nothing else can differ, as every word
//           has one writer and no event depends on a value. The states form a graph without cycles,
//           since an event happens once.
// Reduction An event that no other minds is taken alone, and all others are put off: a persistent
//           set of one event (Godefroid 1996), computed in every state. No other minds a read or a
//           write if no event that could possibly happen before it touches the same word from the
//           other side: everything happens that can happen without this event. No bug is assumed
//           away: a program without waits is one where everything can. No other minds a publish or
//           a wait, which only grow and only let pass: once a wait may end it may always end. This
//           is checked for every wait; where it does not hold, all orders are tried. A graph
//           without cycles needs nothing more for every violation and every deadlock to be found.
//           The tests compare with the search of every order on programs that are small enough.
#pragma once

#include <cstddef>
#include <string>

#include "recording.h"

namespace pyringar::model {

struct Verdict {
  bool is_proved = false;
  std::size_t num_states = 0;
  std::string report{};  // of a violation: numbered steps, then what is wrong
};

Verdict explore(const Recording& recording, bool tries_every_order);

}  // namespace pyringar::model
