// shared_memory: memfd_create, seals, /proc/PID/fd.
//
// Tests     tests/test_process_registered.py

#include "os/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "core/error.h"
#include "os/memory.h"

namespace pyringar {

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, bytes_);
  close_fd();
}

void SharedMemory::close_fd() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

#if defined(__linux__)

namespace {

// A descriptor that is closed unless it is released.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

[[noreturn]] void fail_with(int error, const char* purpose, std::size_t bytes, const char* what) {
  fail(
      ErrorKind::kState, "cannot ", what, " ", bytes, " bytes of shared memory for ", purpose, ": ",
      std::strerror(error),
      error == ENOMEM || error == ENOSPC || error == EFBIG
          ? join(
                ". The limit is the memory of this machine or of a cgroup (a container, a job), of "
                "which ",
                memory_left_bytes(), " bytes are left (or `ulimit -f`)")
          : "");
}

std::byte* map(int fd, std::size_t bytes, const char* purpose) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail_with(errno, purpose, bytes, "map");
  return static_cast<std::byte*>(data);
}

// Whether so many bytes fit, and what the kernel needs to keep track of them: page tables, and the
// tree of a file's pages.
bool fits(std::size_t bytes) {
  const std::size_t left = memory_left_bytes();
  return bytes <= left && bytes / 128 <= left - bytes;
}

// An errno, or 0. The kernel would look for pages until it has to kill somebody, so what cannot fit
// is not asked for; others take memory meanwhile, so that is looked at again and again. A signal
// ends a search and undoes it: little by little, so that there is progress between any two.
int find_pages(int fd, std::size_t bytes) {
  constexpr std::size_t kStep = std::size_t{2} << 20;
  constexpr std::size_t kStepsPerLook = 32;
  for (std::size_t at = 0; at < bytes;) {
    if (at % (kStepsPerLook * kStep) == 0 && !fits(bytes - at)) return ENOMEM;
    const std::size_t step = std::min(kStep, bytes - at);
    const int error = posix_fallocate(fd, static_cast<off_t>(at), static_cast<off_t>(step));
    if (error == EINTR) continue;
    if (error != 0) return error;
    at += step;
  }
  return 0;
}

constexpr const char* kWhoMayOpen =
    ". Processes that share memory must run as one user, in one user namespace, see each other in "
    "/proc, and must not have forbidden others to look into them (PR_SET_DUMPABLE 0, as setuid "
    "programs and file capabilities do)";
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

SharedMemory SharedMemory::create(std::size_t bytes, const char* purpose) {
  Descriptor fd(memfd_create("pyringar", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) fail_with(errno, purpose, bytes, "create");
  if (fchmod(fd.get(), 0600) != 0) fail_with(errno, purpose, bytes, "protect");
  const int error = find_pages(fd.get(), bytes);
  if (error != 0) fail_with(error, purpose, bytes, "allocate");
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) fail_with(errno, purpose, bytes, "seal");
  std::byte* data = map(fd.get(), bytes, purpose);
  return {data, bytes, fd.release()};
}

SharedMemory SharedMemory::open(std::int32_t pid, int fd, std::size_t bytes, const char* purpose) {
  const std::string path = join("/proc/", pid, "/fd/", fd);
  const Descriptor own(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (own.get() < 0) {
    fail(ErrorKind::kState, "cannot open ", path, ", the ", bytes, " bytes of shared memory for ",
         purpose, ": ", std::strerror(errno), kWhoMayOpen);
  }
  struct stat status;
  if (fstat(own.get(), &status) != 0) fail_with(errno, purpose, bytes, "look at");
  const int seals = fcntl(own.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || status.st_uid != geteuid() ||
      static_cast<std::size_t>(status.st_size) != bytes) {
    fail(ErrorKind::kState, path, " is not the shared memory for ", purpose, ": expected ", bytes,
         " bytes of sealed memory of user ", geteuid(), ", found ", status.st_size,
         " bytes of user ", status.st_uid, kWhoMayOpen);
  }
  return {map(own.get(), bytes, purpose), bytes, -1};
}

#else

SharedMemory SharedMemory::create(std::size_t, const char* purpose) {
  fail(ErrorKind::kUnsupported, "no shared memory for ", purpose,
       ": ranks in processes of their own need Linux; one process can drive all ranks everywhere");
}

SharedMemory SharedMemory::open(std::int32_t, int, std::size_t bytes, const char* purpose) {
  return create(bytes, purpose);
}

#endif

}  // namespace pyringar
