// text: files of /proc and of cgroups, and the words and numbers in them.
//
// Floor     os: std and the operating system.
// Contract  what cannot be read is empty, or no number. No streams: see append() in core/error.h.
// Threads   any.
// Tests     tests/test_memory_limits.py, tests/build/test_symbols.py
#pragma once

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace pyringar {

// All bytes of a file; "" if it cannot be read to its end (a process may end meanwhile).
inline std::string read_file(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return "";
  std::string text;
  char block[4096];
  ssize_t count = 0;
  while ((count = read(file, block, sizeof block)) > 0 || (count < 0 && errno == EINTR)) {
    if (count > 0) text.append(block, static_cast<std::size_t>(count));
  }
  close(file);
  return count == 0 ? text : "";
}

// Takes the first line or word off the front of a text.
inline std::string_view take_until(std::string_view& text, char end) {
  const std::string_view taken = text.substr(0, text.find(end));
  text.remove_prefix(std::min(text.size(), taken.size() + 1));
  return taken;
}

inline std::string_view take_line(std::string_view& text) { return take_until(text, '\n'); }

inline std::string_view take_word(std::string_view& line, int num_skipped = 0) {
  for (;; --num_skipped) {
    line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
    const std::string_view word = take_until(line, ' ');
    if (num_skipped == 0) return word;
  }
}

// The number with which a text begins.
inline std::optional<std::uint64_t> to_number(std::string_view text) {
  std::uint64_t number = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), number);
  return read.ec == std::errc() ? std::optional(number) : std::nullopt;
}

}  // namespace pyringar
