// process: reads /proc/PID/stat, and moves threads by affinity masks.
#include "os/process.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/error.h"

#if defined(__linux__)
#include <sched.h>
#endif

namespace pyringar {

namespace {

struct Stat {
  char state = 0;  // letter of the process state; 0: no such process, or no /proc
  std::uint64_t flags = 0;
  std::uint64_t start_ticks = 0;
};

// /proc/PID/stat is "PID (name) S ...": flags in field 9, start in 22. The name may hold ')'.
Stat read_stat(std::int32_t pid) {
  const std::string path = join("/proc/", pid, "/stat");
  std::FILE* file = std::fopen(path.c_str(), "re");
  if (file == nullptr) return {};
  char text[4096];
  text[std::fread(text, 1, sizeof text - 1, file)] = '\0';
  std::fclose(file);
  const char* name_end = std::strrchr(text, ')');
  Stat stat;
  const bool is_read = name_end != nullptr &&
                       std::sscanf(name_end + 1,
                                   " %c %*s %*s %*s %*s %*s %" SCNu64
                                   " %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNu64,
                                   &stat.state, &stat.flags, &stat.start_ticks) == 3;
  return is_read ? stat : Stat{};
}

ProcessId read_own() {
  const auto pid = static_cast<std::int32_t>(getpid());
  return {pid, read_stat(pid).start_ticks};
}

// Read once for all threads: qemu reports a different start time to each thread.
const ProcessId process_at_load = read_own();

}  // namespace

ProcessId this_process() {
  return process_at_load.pid == static_cast<std::int32_t>(getpid()) ? process_at_load : read_own();
}

bool is_alive(const ProcessId& process) {
  const ProcessId self = this_process();
  if (process.pid == self.pid) return process.start_ticks == self.start_ticks;
  const Stat stat = read_stat(process.pid);
  if (stat.state != 0) {
    const bool is_same = process.start_ticks == 0 || process.start_ticks == stat.start_ticks;
    return is_same && stat.state != 'Z' && stat.state != 'X';
  }
  // Without a readable /proc: EPERM means that the process lives and belongs to another user.
  return kill(process.pid, 0) == 0 || errno == EPERM;
}

std::uint32_t fork_generation() {
  static std::atomic<std::uint32_t> fork_count{0};
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });
  if (registered != 0) fail(ErrorKind::kState, "pthread_atfork failed with error ", registered);
  return fork_count.load(std::memory_order_relaxed);
}

bool is_forked_process() {
  constexpr std::uint64_t kForkedNoExec = 0x40;  // the kernel's PF_FORKNOEXEC, since Linux 2.0
  return (read_stat(static_cast<std::int32_t>(getpid())).flags & kForkedNoExec) != 0;
}

std::string host_name() {
  char name[256] = {};
  return gethostname(name, sizeof name - 1) == 0 ? name : "unknown host";
}

#if defined(__linux__)

int current_core() { return sched_getcpu(); }

void move_off_core(int core) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  cpu_set_t others = allowed;
  CPU_CLR(static_cast<unsigned>(core), &others);
  if (CPU_COUNT(&others) == 0) return;
  // If a cgroup forbids the change, the thread stays on its core: slower, but correct.
  if (sched_setaffinity(0, sizeof others, &others) == 0) {
    static_cast<void>(sched_setaffinity(0, sizeof allowed, &allowed));
  }
}

#else

int current_core() { return -1; }
void move_off_core(int) {}

#endif

}  // namespace pyringar
