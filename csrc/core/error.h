// error: the one exception type that engines throw, with its kind.
// Contract  A message names the operation, the rank or argument at fault, the value and what was
//           expected. The bindings turn each kind into a class of pyringar.errors.
// Tests     tests/conformance/test_refused.py
#pragma once

#include <charconv>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace pyringar {

enum class ErrorKind { kArgument, kUnsupported, kTimeout, kState, kCuda, kPeerLost };

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

// Append text, a character or a number; floats with six significant digits, as "%g" does. Uses no
// streams: their locales break if the process has a static and torch's shared libstdc++.
template <typename Part>
void append(std::string& text, const Part& part) {
  if constexpr (std::is_convertible_v<const Part&, std::string_view>) {
    text += std::string_view(part);
  } else if constexpr (std::is_same_v<Part, char>) {
    text += part;
  } else {
    char digits[32];
    std::to_chars_result end;
    if constexpr (std::is_floating_point_v<Part>) {
      end = std::to_chars(digits, digits + sizeof digits, part, std::chars_format::general, 6);
    } else {
      end = std::to_chars(digits, digits + sizeof digits, +part);
    }
    text += std::string_view(digits, end.ptr);
  }
}

template <typename... Parts>
std::string join(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

template <typename... Parts>
[[noreturn]] void fail(ErrorKind kind, const Parts&... parts) {
  throw Error(kind, join(parts...));
}

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
