// death_notice: the SIGTERM handler, and the groups in which it searches for dead ranks.

#include "process/death_notice.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>

namespace pyringar {

namespace {

// Groups that end_process() searches for dead ranks. Eight: later groups have the same ranks.
std::array<std::atomic<const DeathNotice*>, 8> notices{};

void end_process(int number) {
  bool is_written = false;
  for (const auto& notice : notices) {
    const DeathNotice* each = notice.load();
    if (each == nullptr || !each->is_own()) continue;
    is_written = is_written || each->write_line();
    each->leave();
  }
  raise(number);  // SA_RESETHAND restored the default action, which ends the process on return
}

void install_handler() {
  struct sigaction action{};
  if (sigaction(SIGTERM, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = &end_process;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  static_cast<void>(sigaction(SIGTERM, &action, nullptr));
}

}  // namespace

DeathNotice::DeathNotice(const Segment& segment, int rank)
    : segment_(segment), rank_(rank), pid_(static_cast<int>(getpid())) {
  if (std::getenv("TORCHELASTIC_ERROR_FILE") == nullptr) return;
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
  std::array<char, 256> text{};
  std::size_t size = 0;
  const auto add = [&](const char* more) {
    while (*more != '\0' && size < text.size()) text[size++] = *more++;
  };
  const auto add_number = [&](int number) {  // not by snprintf, which may allocate memory
    std::array<char, 12> digits{};
    char* first = &digits.back();
    for (; number > 0 || *first == '\0'; number /= 10) {
      *--first = static_cast<char>('0' + number % 10);
    }
    add(first);
  };
  for (int rank = 0; rank < segment_.world_size(); ++rank) {
    RankLine& line = segment_.line(rank);
    // torchrun has reaped the dead process, so kill() gives ESRCH.
    if (line.state.load() != RankState::kJoined || kill(line.process.pid, 0) == 0) continue;
    if (errno != ESRCH) continue;
    if (line.is_named.exchange(true)) return true;
    add("pyringar: rank ");
    add_number(line.global_rank);
    add(" (process ");
    add_number(line.process.pid);
    add(" on ");
    add(line.host.data());
    add(") has died; SIGTERM ends the other ranks\n");
    static_cast<void>(!write(STDERR_FILENO, text.data(), size));
    return true;
  }
  return false;
}

}  // namespace pyringar
