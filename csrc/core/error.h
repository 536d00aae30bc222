// error: the one exception type that engines throw, with the kind the caller will see.
//
// Floor     core: host only (device code reports through a status word, see the ring program).
// Contract  the message names the operation, the culprit, the value and what was expected; the
//           bindings turn each kind into the class of the same name in pyringar.errors.
// Tests     tests/test_arguments.py
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace pyringar {

enum class ErrorKind { kArgument, kUnsupported, kTimeout, kState, kCuda, kPeerLost };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <typename... Parts>
std::string join(Parts&&... parts) {
  std::ostringstream text;
  (text << ... << std::forward<Parts>(parts));
  return text.str();
}

template <typename... Parts>
[[noreturn]] void fail(ErrorKind kind, Parts&&... parts) {
  throw Error(kind, join(std::forward<Parts>(parts)...));
}

// Why a communicator refuses calls, in the same words whatever its engine.
[[noreturn]] inline void fail_closed(const std::string& why = "") {
  fail(ErrorKind::kState, "this communicator is closed", why.empty() ? "" : ": ", why);
}

[[noreturn]] inline void fail_forked() {
  fail(ErrorKind::kState,
       "this communicator was made before fork() and belongs to the parent process. Make a new one "
       "in the child");
}

[[noreturn]] inline void fail_after(ErrorKind kind, const std::string& failure) {
  fail(kind, "this communicator failed before and cannot be used again: ", failure);
}

}  // namespace pyringar
