// os_shared_memory: memfd_create, seals, /proc/PID/fd.
//
// Floor     cpu
// Tests     tests/test_processes.py

#include "cpu/os_shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
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
  fail(ErrorKind::kState, "cannot ", what, " ", bytes, " bytes of shared memory for ", purpose,
       ": ", std::strerror(error),
       error == ENOMEM || error == ENOSPC || error == EFBIG
           ? ". The limit is the memory of this machine or container (or `ulimit -f`)"
           : "");
}

std::byte* map(int fd, std::size_t bytes, const char* purpose) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) fail_with(errno, purpose, bytes, "map");
  return static_cast<std::byte*>(data);
}

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

SharedMemory SharedMemory::create(std::size_t bytes, const char* purpose) {
  Descriptor fd(memfd_create("pyringar", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd.get() < 0) fail_with(errno, purpose, bytes, "create");
  if (fchmod(fd.get(), 0600) != 0) fail_with(errno, purpose, bytes, "protect");
  const int error = posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes));
  if (error != 0) fail_with(error, purpose, bytes, "allocate");
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) fail_with(errno, purpose, bytes, "seal");
  std::byte* data = map(fd.get(), bytes, purpose);
  return {data, bytes, fd.release()};
}

SharedMemory SharedMemory::open(std::int32_t pid, int fd, std::size_t bytes, const char* purpose) {
  const std::string path = join("/proc/", pid, "/fd/", fd);
  const Descriptor own(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (own.get() < 0) fail_with(errno, purpose, bytes, join("open ", path, ", ").c_str());
  struct stat status;
  if (fstat(own.get(), &status) != 0) fail_with(errno, purpose, bytes, "look at");
  const int seals = fcntl(own.get(), F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || status.st_uid != geteuid() ||
      static_cast<std::size_t>(status.st_size) != bytes) {
    fail(ErrorKind::kState, path, " is not the shared memory for ", purpose, ": expected ", bytes,
         " bytes of sealed memory of user ", geteuid(), ", found ", status.st_size,
         " bytes of user ", status.st_uid);
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
