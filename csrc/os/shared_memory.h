// shared_memory: anonymous memory that several processes map. It has no name in a file system.
// Contract  create() allocates all pages: too little memory is an error there, not a crash later.
//           The kernel frees the pages with the last mapping. open() takes the creator's process id
//           and descriptor, and needs the same user and permission to look into the creator.
// Tests     tests/cpp/process_test.cpp
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace pyringar {

class SharedMemory {
 public:
  static SharedMemory create(std::size_t bytes, const char* purpose);
  // Map `bytes` of memory that process `pid` has open as descriptor `fd`.
  static SharedMemory open(std::int32_t pid, int fd, std::size_t bytes, const char* purpose);

  SharedMemory(SharedMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)),
        bytes_(std::exchange(other.bytes_, 0)),
        fd_(std::exchange(other.fd_, -1)) {}
  SharedMemory& operator=(SharedMemory&&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }  // -1 after close_fd()
  // Close the descriptor. Other processes cannot open the memory any more; mappings stay valid.
  void close_fd();

 private:
  SharedMemory(std::byte* data, std::size_t bytes, int fd) : data_(data), bytes_(bytes), fd_(fd) {}

  std::byte* data_;
  std::size_t bytes_;
  int fd_;
};

}  // namespace pyringar
