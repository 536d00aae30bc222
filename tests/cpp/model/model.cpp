// model: proves, or refutes with a trace, that the programs of csrc/core share slots rightly: every
// interleaving of the real templates, on a memory with store buffers.
//
//   model --ranks 3 --calls direct:3,exchange:3 --base -4 [--slots 4] [--swaps 0] [--ring-slots 8]
//         [--reduced-behind 0] [--bug two-ahead] [--every-order 1]
//
// Decides    No piece is lost, added twice or torn; nobody reads a slot that its owner may be
//            writing, or what was there before; nobody overwrites what somebody has still to read
//            (who reads it later finds the wrong message); nobody waits for ever; every rank ends,
//            and its counters stand where the next call expects them; all this while counters pass
//            2^32.
// Explored   calls after each other, as the command line says; tests/test_model.py holds the lists,
//            of 2 and 3 ranks, some of 4 and 5. Sizes are of messages: a message is k words, or
//            one in the ring.
// Not        deadlines, aborts, and what is read to explain them; how a rank sleeps and is woken
// modelled   (a wait here may end as soon as it may); that ranks which ask for different calls all
//            notice it (`refused:n`: they all do); writes that do not reach all ranks at once;
//            reads that make values out of thin air; slots in which the ring leaves data
//            (zero-copy); several runners of one rank; an engine's own memory: that it copies, adds
//            and counts as the recorder says is its tests' matter.
// Exit       0 proved, 1 refuted, 2 bad arguments.

#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <sstream>
#include <string>

#include "core/error.h"
#include "explore.h"
#include "recorders.h"

namespace pyringar::model {

namespace {

Call parse_call(const std::string& text) {
  static const std::map<std::string, Call> kCalls = {
      {"direct", {CallKind::kDirect, 1}},
      {"exchange", {CallKind::kExchange, 1}},
      {"ring", {CallKind::kRing, 1}},
      {"scatter", {CallKind::kScatter, 1}},
      {"gather", {CallKind::kGather, 1}},
      {"refused", {CallKind::kDirect, 1, true}},
      {"refused-exchange", {CallKind::kExchange, 1, true}},
  };
  const std::size_t colon = text.find(':');
  Call call = kCalls.at(text.substr(0, colon));
  call.pieces = std::stoul(text.substr(colon + 1));
  return call;
}

std::vector<Call> parse_calls(const std::string& text) {
  std::vector<Call> calls;
  std::istringstream list(text);
  for (std::string call; std::getline(list, call, ',');) calls.push_back(parse_call(call));
  return calls;
}

struct Arguments {
  Setup setup;
  bool tries_every_order = false;
};

Arguments parse(const std::vector<std::string>& words) {
  Arguments arguments;
  Setup& setup = arguments.setup;
  for (std::size_t i = 0; i + 1 < words.size(); i += 2) {
    const std::string& value = words[i + 1];
    const auto set_counter = [&](std::uint32_t& counter) {
      counter = static_cast<std::uint32_t>(std::stoll(value));
    };
    const std::map<std::string, std::function<void()>> options = {
        {"--ranks", [&] { setup.num_ranks = std::stoi(value); }},
        {"--calls", [&] { setup.calls = parse_calls(value); }},
        {"--slots", [&] { set_counter(setup.slots); }},
        {"--swaps", [&] { setup.swaps = value != "0"; }},
        {"--ring-slots", [&] { set_counter(setup.ring_slots); }},
        {"--base", [&] { set_counter(setup.base); }},
        {"--reduced-behind", [&] { set_counter(setup.reduced_behind); }},
        {"--bug", [&] { setup.bug = value; }},
        {"--every-order", [&] { arguments.tries_every_order = value != "0"; }},
    };
    options.at(words[i])();
  }
  return arguments;
}

int run(const std::vector<std::string>& words) {
  const Arguments arguments = parse(words);
  const auto start = std::chrono::steady_clock::now();
  const Recording recording = record(arguments.setup);
  const Verdict verdict = explore(recording, arguments.tries_every_order);
  const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - start;
  const char* word = verdict.is_proved ? "proved" : "refuted";
  std::printf("%s%s: %zu states, %zu events, %.2f s\n", verdict.report.c_str(), word,
              verdict.num_states, recording.events().size(), passed.count());
  return verdict.is_proved ? 0 : 1;
}

}  // namespace

}  // namespace pyringar::model

int main(int argc, char** argv) {
  try {
    return pyringar::model::run({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
