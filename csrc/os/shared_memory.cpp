// shared_memory: memfd_create(), and /proc/PID/fd to open the memory of another process.
#include "os/shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>

#include "core/error.h"

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

std::size_t available_bytes() {
  std::size_t kib = std::numeric_limits<std::size_t>::max() / 1024;
  if (std::FILE* file = std::fopen("/proc/meminfo", "re")) {
    char line[256];
    while (std::fgets(line, sizeof line, file) != nullptr) {
      if (std::sscanf(line, "MemAvailable: %zu", &kib) == 1) break;
    }
    std::fclose(file);
  }
  return kib * 1024;
}

[[noreturn]] void fail_with(int error, const char* purpose, std::size_t bytes, const char* what) {
  const bool is_full = error == ENOMEM || error == ENOSPC || error == EFBIG;
  const std::string limit = join(". The limit is the memory of this machine, of which ",
                                 available_bytes(), " bytes are left (or `ulimit -f`)");
  fail(ErrorKind::kState, "cannot ", what, " ", bytes, " bytes of shared memory for ", purpose,
       ": ", std::strerror(error), is_full ? limit : "");
}

std::byte* map(int fd, std::size_t bytes, const char* purpose) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail_with(errno, purpose, bytes, "map");
  return static_cast<std::byte*>(data);
}

// Allocate all pages; return 0 or an errno. Check the available memory first: the kernel would kill
// processes to find more pages. Allocate in small steps: a signal undoes a whole posix_fallocate().
int allocate_pages(int fd, std::size_t bytes) {
  constexpr std::size_t kStep = std::size_t{2} << 20;
  if (bytes > available_bytes()) return ENOMEM;
  for (std::size_t at = 0; at < bytes;) {
    const std::size_t step = std::min(kStep, bytes - at);
    const int error = posix_fallocate(fd, static_cast<off_t>(at), static_cast<off_t>(step));
    if (error == EINTR) continue;
    if (error != 0) return error;
    at += step;
  }
  return 0;
}

constexpr const char* kOpenRequirements =
    ". Processes that share memory must run as one user, in one user namespace, see each other in "
    "/proc, and must not forbid other processes to inspect them (PR_SET_DUMPABLE 0, as setuid "
    "programs and file capabilities do)";

}  // namespace

SharedMemory SharedMemory::create(std::size_t bytes, const char* purpose) {
  SharedMemory memory(nullptr, bytes, memfd_create("pyringar", MFD_CLOEXEC));
  if (memory.fd_ < 0) fail_with(errno, purpose, bytes, "create");
  const int error = allocate_pages(memory.fd_, bytes);
  if (error != 0) fail_with(error, purpose, bytes, "allocate");
  memory.data_ = map(memory.fd_, bytes, purpose);
  return memory;
}

SharedMemory SharedMemory::open(std::int32_t pid, int fd, std::size_t bytes, const char* purpose) {
  const std::string path = join("/proc/", pid, "/fd/", fd);
  SharedMemory memory(nullptr, bytes, ::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (memory.fd_ < 0) {
    fail(ErrorKind::kState, "cannot open ", path, ", the ", bytes, " bytes of shared memory for ",
         purpose, ": ", std::strerror(errno), kOpenRequirements);
  }
  struct stat status;
  if (fstat(memory.fd_, &status) != 0) fail_with(errno, purpose, bytes, "inspect");
  if (static_cast<std::size_t>(status.st_size) != bytes) {
    fail(ErrorKind::kState, path, " is not the shared memory for ", purpose, ": expected ", bytes,
         " bytes, found ", status.st_size);
  }
  memory.data_ = map(memory.fd_, bytes, purpose);
  memory.close_fd();
  return memory;
}

#else

SharedMemory SharedMemory::create(std::size_t, const char* purpose) {
  fail(ErrorKind::kUnsupported, "no shared memory for ", purpose,
       ": ranks in separate processes need Linux; one process can run all ranks on every system");
}

SharedMemory SharedMemory::open(std::int32_t, int, std::size_t bytes, const char* purpose) {
  return create(bytes, purpose);
}

#endif

}  // namespace pyringar
