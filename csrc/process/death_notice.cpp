// death_notice: the handler of SIGTERM, and the groups that it asks.

#include "process/death_notice.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>

namespace pyringar {

namespace {

// A process that makes more groups has all ranks in the first ones.
std::array<std::atomic<const DeathNotice*>, 8> notices{};

void end_process(int number) {
  bool is_written = false;
  for (const auto& notice : notices) {
    const DeathNotice* each = notice.load();
    if (each == nullptr || !each->is_own()) continue;
    is_written = is_written || each->write_line();
    each->leave();
  }
  raise(number);  // SA_RESETHAND has restored the default action; it takes effect on return
}

void install_handler() {
  struct sigaction action{};
  if (sigaction(SIGTERM, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = &end_process;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  static_cast<void>(sigaction(SIGTERM, &action, nullptr));
}

// The functions of the standard library that format numbers may take memory.
class Line {
 public:
  void add(const char* text) {
    for (; *text != '\0' && size_ < text_.size(); ++text) text_[size_++] = *text;
  }
  void add(int number) {
    std::array<char, 12> digits{};
    char* at = &digits.back();
    do {
      *--at = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number > 0);
    add(at);
  }
  void write() const { static_cast<void>(!::write(STDERR_FILENO, text_.data(), size_)); }

 private:
  std::array<char, 256> text_{};
  std::size_t size_ = 0;
};

}  // namespace

DeathNotice::DeathNotice(const Segment& segment, int rank)
    : segment_(segment), rank_(rank), pid_(static_cast<int>(getpid())) {
  if (std::getenv("TORCHELASTIC_ERROR_FILE") == nullptr) return;
  const char* number = std::getenv("RANK");
  segment_.line(rank).global_rank =
      number == nullptr ? rank : static_cast<int>(std::strtol(number, nullptr, 10));
  install_handler();
  for (auto& notice : notices) {
    const DeathNotice* none = nullptr;
    if (notice.compare_exchange_strong(none, this)) return;
  }
}

DeathNotice::~DeathNotice() {
  for (auto& notice : notices) {
    const DeathNotice* self = this;
    notice.compare_exchange_strong(self, nullptr);
  }
}

bool DeathNotice::is_own() const { return getpid() == pid_; }

bool DeathNotice::write_line() const {
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    const RankLine& line = segment_.line(rank);
    // torchrun has waited for the dead process, so that its id is free.
    if (line.state.load() != RankState::kJoined || kill(line.process.pid, 0) == 0) continue;
    if (errno != ESRCH) continue;
    Line text;
    text.add("pyringar: rank ");
    text.add(line.global_rank);
    text.add(" (process ");
    text.add(line.process.pid);
    text.add(" on ");
    text.add(line.host.data());
    text.add(") has died, and SIGTERM ends rank ");
    text.add(segment_.line(rank_).global_rank);
    text.add("\n");
    text.write();
    return true;
  }
  return false;
}

}  // namespace pyringar
