// shared_memory: memory that several processes map and that no file system knows.
//
// Contract  The pages are there when create() returns: what does not fit is an error then, not a
//           crash later. The kernel frees them with the last mapping. Only processes of the same
//           user that may look into the creator can open it, by its process id and descriptor.
// Threads   any; one object belongs to one thread at a time.
// Tests     tests/cpp/process_test.cpp
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace pyringar {

class SharedMemory {
 public:
  static SharedMemory create(std::size_t bytes, const char* purpose);
  // Maps what process `pid` holds as descriptor `fd`: memory of `bytes`.
  static SharedMemory open(std::int32_t pid, int fd, std::size_t bytes, const char* purpose);

  SharedMemory(SharedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        fd_(std::exchange(other.fd_, -1)) {}
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }  // -1 once closed
  // Others can open it no more; mappings stay.
  void close_fd();

 private:
  SharedMemory(std::byte* data, std::size_t bytes, int fd) : data_(data), bytes_(bytes), fd_(fd) {}

  std::byte* data_;
  std::size_t bytes_;
  int fd_;
};

}  // namespace pyringar
