#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

// Hide false reports: ThreadSanitizer does not see libstdc++'s atomic counts of exception
// references.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\n"
         "race:std::runtime_error::~runtime_error\n";
}

namespace pyringar::stress {

namespace {

Position position{"", 0, 0};
constexpr std::size_t kGuardBytes = 64;
constexpr std::byte kCanary{0xa5};

}  // namespace

void set_position(const Position& now) { position = now; }

void fail_check(const char* file, int line, const char* condition, const std::string& values) {
  static std::mutex once;
  once.lock();  // never unlocked: only the first failure is printed
  std::fprintf(stderr, "%s:%d: CHECK(%s) failed%s%s\n", file, line, condition,
               values.empty() ? "" : ": ", values.c_str());
  std::fprintf(stderr, "again: --only %s --seed %llu --from-round %llu --rounds 1\n", position.part,
               static_cast<unsigned long long>(position.seed),
               static_cast<unsigned long long>(position.round));
  std::fflush(stderr);
  std::_Exit(1);
}

std::size_t random_numel(Random& random, std::size_t most) {
  switch (random.below(8)) {
    case 0:
      return std::min(most, random.below(4));
    case 1:
      return random.below(most + 1);
    case 2:
      return std::min(most, random.below(2000));
    default:
      return std::min(most, random.below(300));
  }
}

void dawdle(Random& random) {
  const std::size_t luck = random.below(256);
  if (luck < 16) std::this_thread::yield();
  if (luck == 255) std::this_thread::sleep_for(std::chrono::microseconds(random.below(200)));
}

Guarded::Guarded(Random& random, std::size_t bytes, std::size_t offset)
    : size_(bytes),
      before_(kGuardBytes + offset),
      behind_(random.one_in(2) ? 0 : kGuardBytes),
      memory_(std::make_unique_for_overwrite<std::byte[]>(before_ + bytes + behind_)) {
  std::memset(memory_.get(), static_cast<int>(kCanary), before_ + bytes + behind_);
}

void Guarded::check_canaries() const {
  for (std::size_t i = 0; i < before_; ++i) {
    CHECK(memory_[i] == kCanary, "written ", before_ - i, " bytes before ", size_);
  }
  for (std::size_t i = 0; i < behind_; ++i) {
    CHECK(data()[size_ + i] == kCanary, "written ", i, " bytes behind ", size_);
  }
}

void on_all_ranks(int world_size, const std::function<void(int rank)>& program) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) threads.emplace_back(program, rank);
  for (std::thread& thread : threads) thread.join();
}

void in_child(const std::function<void()>& program) {
  const pid_t child = fork();
  CHECK(child >= 0, "fork failed");
  if (child == 0) {
    alarm(60);
    program();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child, "waitpid failed");
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child exited with status ", status);
}

std::string message_of(ErrorKind kind, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    CHECK(error.kind() == kind, "kind ", static_cast<int>(error.kind()), " instead of ",
          static_cast<int>(kind), ": ", error.what());
    return error.what();
  }
  CHECK(false, "nothing thrown; expected an error of kind ", static_cast<int>(kind));
  return "";
}

void check_throws(ErrorKind kind, std::string_view words, const std::function<void()>& action) {
  const std::string message = message_of(kind, action);
  CHECK(message.find(words) != std::string::npos, "\"", message, "\" does not say \"", words, "\"");
}

void check_one_of_three(const std::function<std::string()>& attempt) {
  std::string complaints;
  for (int i = 0; i < 3; ++i) {
    const std::string complaint = attempt();
    if (complaint.empty()) return;
    complaints += "\n  " + complaint;
  }
  CHECK(false, "three times in a row:", complaints);
}

}  // namespace pyringar::stress
